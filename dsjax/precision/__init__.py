"""Number formats: which operator computes in which type."""

from dsjax.precision.policy import POLICIES, apply_policy, compute_dtype

__all__ = ["POLICIES", "apply_policy", "compute_dtype"]
