"""Number formats: which operator computes in which type."""

from dsjax.precision.delayed import histories_of
from dsjax.precision.policy import POLICIES, Policy, compute_dtype, without_fp8

__all__ = ["POLICIES", "Policy", "compute_dtype", "histories_of", "without_fp8"]
