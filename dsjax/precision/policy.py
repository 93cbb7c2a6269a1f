"""Compute types of a model's layers, set from outside the model.

Master parameters stay fp32.  Layers whose work is a matrix product or a lookup compute in the
policy's type, if their author left their `dtype` open; normalisations, softmax and losses keep
fp32, as they always compute in fp32 inside.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

POLICIES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
_KEEP_FP32 = (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.BatchNorm)


def compute_dtype(policy: str, platform: str) -> Any:
    """The type of matrix products under a policy ("auto": bf16 on GPU and TPU, fp32 on CPU)."""
    if policy == "auto":
        policy = "fp32" if platform == "cpu" else "bf16"
    return POLICIES[policy]


def apply_policy(model: nnx.Module, dtype: Any) -> nnx.Module:
    """Sets `dtype` on the layers that leave it open (None); returns the model.

    A layer of the user's own takes part by having a `dtype` attribute; one whose `dtype` is
    already set, and every normalisation, stays as it is.
    """
    if dtype == jnp.float32:
        return model
    for _, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Module) or isinstance(node, _KEEP_FP32):
            continue
        if getattr(node, "dtype", ...) is None:
            setattr(node, "dtype", dtype)  # noqa: B010  the type checker knows no such attribute
    return model
