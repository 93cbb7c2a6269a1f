"""What any process may ask of all of them: it rides in the step, so that all act after the same one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

STOP, SAVE = 1, 2
_BITS = 2


def counted(votes: jax.Array) -> jax.Array:
    """What at least one of int32 [devices] asks for, as the sum of STOP and SAVE.

    By a maximum for each of them: GPUs' collectives have no bitwise or.
    """
    bits = jnp.arange(_BITS)
    return jnp.sum(jnp.max((votes[:, None] >> bits) & 1, axis=0) << bits)
