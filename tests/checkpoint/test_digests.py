"""Checksums: the same however an array is cut, another for any change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dsjax.checkpoint.digests import compiled, digests, verify
from dsjax.errors import InputError

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def placed(tree, *spec):
    return jax.device_put(tree, NamedSharding(MESH, PartitionSpec(*spec)))


def values(shape=(8, 4)):
    drawn = jax.random.normal(jax.random.key(0), shape)
    types = [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8, jnp.int4, jnp.uint32, jnp.bool_]
    return {str(jnp.dtype(t)): (drawn * 3).astype(t) for t in types}


@pytest.mark.parametrize("spec", [("a",), (None, "b"), (("a", "b"),), ("b", "a"), ()])
def test_any_cut_gives_the_same_digest(spec):
    whole = values()
    assert (
        digests(placed(whole, *spec))
        == digests(whole)
        == digests({k: np.asarray(v) for k, v in whole.items()})
    )
    assert len(set(digests(whole).values())) == len(whole)


def test_every_bit_and_every_place_counts():
    base = np.zeros((4, 8), np.float32)
    seen = {digests({"x": base})["x"]}
    for position in range(base.size):
        for bit in (0, 13, 31):
            words = base.copy().view(np.uint32).ravel()
            words[position] ^= np.uint32(1 << bit)
            seen.add(digests({"x": words.view(np.float32).reshape(base.shape)})["x"])
    assert len(seen) == 1 + base.size * 3
    order = np.arange(32, dtype=np.int32)
    swapped = [order.copy() for _ in range(31)]
    for i, one in enumerate(swapped):
        one[[i, i + 1]] = one[[i + 1, i]]
    assert len({digests({"x": one})["x"] for one in [order, *swapped]}) == 32


def test_shape_and_type_count_and_odd_leaves_pass():
    zeros = {"a": jnp.zeros(4), "b": jnp.zeros((2, 2)), "c": jnp.zeros(4, jnp.int32), "s": jnp.float32(0)}
    assert len(set(digests(zeros).values())) == 4
    assert digests({"n": {"empty": jnp.zeros((0, 3))}}) == {"n/empty": "0" * 16}
    words = digests({"s": np.int64(7), "c": np.complex64(1 + 2j)})
    assert all(len(word) == 16 for word in words.values())


def test_verify_names_what_differs():
    tree = {"p": {"k": jnp.arange(6.0), "new": jnp.ones(2)}}
    expected = digests(tree)
    del expected["p/new"]
    verify(tree, expected, "here")
    tree["p"]["k"] = tree["p"]["k"].at[3].add(1e-6)
    with pytest.raises(InputError, match="here is damaged: p/k not as saved"):
        verify(tree, expected, "here")


def test_the_computation_holds_no_copy_and_gathers_nothing():
    leaves = [placed(jnp.ones((64, 4096)), "a", "b"), placed(jnp.ones((64, 4096), jnp.bfloat16), None, "b")]
    program = compiled(leaves).lower(leaves).compile()
    assert program.memory_analysis().temp_size_in_bytes < 16 * 1024
