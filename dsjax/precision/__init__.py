"""Number formats: which operator computes in which type."""

from dsjax.precision.policy import apply_policy, compute_dtype

__all__ = ["apply_policy", "compute_dtype"]
