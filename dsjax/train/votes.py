"""What any process may ask of all of them: it rides in the step, so that all act after the same one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.mesh import AXES

STOP, SAVE = 1, 2
_BITS = 2


def counted(votes: jax.Array) -> jax.Array:
    """What at least one of int32 [devices] asks for, as the sum of STOP and SAVE.

    By a maximum for each of them: GPUs' collectives have no bitwise or.
    """
    bits = jnp.arange(_BITS)
    return jnp.sum(jnp.max((votes[:, None] >> bits) & 1, axis=0) << bits)


def cast(mesh: Mesh, asked: int) -> jax.Array:
    """What this process asks for, int32 [devices], one number a device of its own."""
    local = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    place = NamedSharding(mesh, P(AXES))
    return jax.make_array_from_process_local_data(place, np.full(local, asked, np.int32), (mesh.size,))
