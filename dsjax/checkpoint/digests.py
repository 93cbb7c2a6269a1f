"""A checksum of every array of a state, which does not depend on how the array is cut over devices.

Each 32-bit word w at position p of an array (small types are widened, large ones split) becomes
``h = mix(w * A xor code(p))``, where mix is MurmurHash3's finaliser, a bijection, and code(p) a linear
code of the index of p in each dimension.  The digest is the two sums ``sum h`` and
``sum h * (code'(p) | 1)`` mod 2^32.  Sums do not mind the order, so every device adds up its own part and
only eight bytes an array cross the mesh; one changed word always changes the first sum.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from dsjax.errors import Damaged
from dsjax.mesh import named_leaves

_WORD = 0x9E3779B1
_CODES = (0x85EBCA77, 0xC2B2AE3D)


def _words(array: jax.Array) -> jax.Array:
    """The array's bits as uint32; types of 64 bits get a last dimension of 2."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    bits = jnp.finfo(array.dtype).bits if jnp.issubdtype(array.dtype, jnp.floating) else None
    bits = bits or jnp.iinfo(array.dtype).bits
    unsigned = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
    return lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _code(shape: tuple[int, ...], base: int) -> jax.Array:
    """base + sum over dimensions d of index_d * base^(d + 1), mod 2^32."""
    code = jnp.full(shape, base, jnp.uint32)
    for d in range(len(shape)):
        factor = jnp.uint32(pow(base, d + 1, 2**32))
        code += lax.broadcasted_iota(jnp.uint32, shape, d) * factor
    return code


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _sums(array: jax.Array) -> jax.Array:
    """The two sums of an array, uint32[2]; its type and shape count too."""
    words = _words(array)
    hashed = _mix(words * jnp.uint32(_WORD) ^ _code(words.shape, _CODES[0]))
    weighed = hashed * (_code(words.shape, _CODES[1]) | jnp.uint32(1))
    kind = jnp.uint32(zlib.crc32(f"{array.dtype}{array.shape}".encode()))
    # One reduction of two operands: two would keep `hashed` in memory between them.
    zero = jnp.uint32(0)
    sums = lax.reduce((hashed, weighed), (zero, zero), _add_both, tuple(range(words.ndim)))
    return jnp.stack(sums) + kind


def _add_both(a: Any, b: Any) -> tuple[Any, Any]:
    return a[0] + b[0], a[1] + b[1]


def _all_sums(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([_sums(array) for array in arrays])


_everywhere: dict[Any, Any] = {}


def compiled(arrays: list[Any]) -> Any:
    """The jitted function of a list of arrays: uint32[arrays, 2], whole on every device."""
    shardings = [getattr(array, "sharding", None) for array in arrays]
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    if mesh not in _everywhere:
        whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        _everywhere[mesh] = jax.jit(_all_sums, out_shardings=whole)
    return _everywhere[mesh]


def digests(stored: Mapping[str, Any]) -> dict[str, str]:
    """16 hexadecimal digits of each array of a stored tree, by its name; all processes call it.

    Args:
      stored: nested dictionaries of plain arrays, as `tree.to_stored` gives them.
    """
    leaves = named_leaves(stored)
    filled = {name: leaf for name, leaf in leaves.items() if math.prod(leaf.shape)}
    if not filled:
        return dict.fromkeys(leaves, "0" * 16)
    result = compiled(list(filled.values()))(list(filled.values()))
    sums = np.asarray(result.addressable_data(0))
    found = {name: f"{int(a):08x}{int(b):08x}" for name, (a, b) in zip(filled, sums, strict=True)}
    return {name: found.get(name, "0" * 16) for name in leaves}


def verify(stored: Mapping[str, Any], expected: Mapping[str, str], where: str) -> None:
    """Compares what was read with the digests written when it was saved; names without one pass.

    Raises:
      Damaged: naming the arrays that are not what was saved.
    """
    wanted = {name: leaf for name, leaf in named_leaves(stored).items() if name in expected}
    found = digests(wanted) if wanted else {}
    wrong = [name for name in wanted if found[name] != expected[name]]
    if wrong:
        shown = ", ".join(wrong[:6]) + (f" and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        raise Damaged(
            f"{where} is damaged: {shown} not as saved (checksums differ); remove it to go on from an earlier one"
        )
