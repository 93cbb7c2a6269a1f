"""Axes, places and the errors of layouts that do not divide."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from dsjax.errors import ConfigError
from dsjax.mesh import (
    Layout,
    batch_shards,
    constrain,
    make_mesh,
    process_rows,
    resolve_sizes,
    use_layout,
    zigzag_order,
)
from dsjax.mesh.axes import SHARD_AXES


def test_the_free_axis_takes_the_rest() -> None:
    assert resolve_sizes({"data": 2, "fsdp": -1, "tensor": 2}, 8)["fsdp"] == 2
    with pytest.raises(ConfigError, match=r"data 3 .*does not divide 8 devices.*1, 2, 4, 8"):
        resolve_sizes({"data": 3, "fsdp": -1}, 8)
    with pytest.raises(ConfigError, match=r"is 4 devices but there are 8; set mesh.fsdp to 4 or to -1"):
        resolve_sizes({"data": 2, "fsdp": 2}, 8)


@given(st.integers(1, 8), st.integers(1, 6))
def test_zigzag_gives_each_rank_the_same_causal_work(ranks: int, width: int) -> None:
    length = 2 * ranks * width
    order = zigzag_order(length, ranks)
    assert sorted(order) == list(range(length))
    work = (order + 1).reshape(ranks, -1).sum(axis=1)
    assert len(set(work.tolist())) == 1


def test_zigzag_refuses_what_does_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"train\.sequence_length 30 does not divide into 8 chunks"):
        zigzag_order(30, 4)


def test_rows_of_a_process_follow_the_mesh() -> None:
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    assert batch_shards(mesh) == 4
    np.testing.assert_array_equal(process_rows(mesh, 16, 2), np.arange(16))


def layout(sizes: dict[str, Any], **axes: tuple[str | None, ...]) -> Layout:
    table = {name.replace("__", "/"): names for name, names in axes.items()}
    return Layout(make_mesh(sizes), table)


def test_a_parameter_without_names_is_cut_along_its_largest_dimension_that_divides() -> None:
    placed = layout({"fsdp": 8})
    assert placed.param_spec("w", (3, 3, 16, 64)) == P(None, None, None, "fsdp")
    assert placed.param_spec("w", (64, 64)) == P("fsdp")
    assert placed.param_spec("w", (63, 24)) == P(None, "fsdp")
    assert placed.param_spec("w", (7,)) == P()
    assert placed.param_spec("w", ()) == P()


def test_names_place_a_parameter_and_patterns_match() -> None:
    placed = Layout(make_mesh({"fsdp": 4, "tensor": 2}), {"layers/*/kernel": ("layers", "embed", "mlp")})
    assert placed.param_spec("layers/up/kernel", (3, 8, 4)) == P(None, "fsdp", "tensor")
    assert placed.param_entries(("layers", "embed", "mlp"), SHARD_AXES) == P(None, None, "tensor")


def test_a_pair_cuts_matrices_along_both_dimensions() -> None:
    assert resolve_sizes({"fsdp": -1, "tensor": [2, 2]}, 8) | {} == {
        "pipeline": 1, "data": 1, "fsdp": 2, "context": 1, "expert": 1, "tensor": 2, "tensor_rows": 2
    }  # fmt: skip
    placed = layout({"fsdp": 2, "tensor": [2, 2]}, w=("embed", "mlp"))
    assert placed.param_spec("w", (8, 8)) == P(("tensor_rows", "fsdp"), "tensor")
    assert placed.param_entries(("embed", "mlp"), SHARD_AXES) == P("tensor_rows", "tensor")
    # What a product makes is cut over both axes, so it has to divide by both.
    with pytest.raises(
        ConfigError, match=r"w: dimension 1 \(mlp, 6\) .* mesh.tensor x tensor rows 4"
    ) as error:
        placed.check({"w": jax.ShapeDtypeStruct((8, 6), jnp.float32)})
    assert "mesh.tensor=2" in error.value.faults[-1] and "[" not in error.value.faults[-1]


def test_parameters_are_cut_over_context_too() -> None:
    placed = layout({"fsdp": 2, "context": 2, "tensor": 2}, w=("embed", "mlp"))
    assert placed.param_spec("w", (8, 8)) == P(("fsdp", "context"), "tensor")
    assert placed.param_entries(("embed", "mlp"), SHARD_AXES) == P(None, "tensor")
    assert placed.param_spec("other", (3, 8)) == P(None, ("fsdp", "context"))
    assert placed.param_spec("other", (3, 2)) == P(None, "fsdp")


def test_a_sequence_is_cut_over_as_many_axes_as_divide_it() -> None:
    placed = layout({"context": 2, "tensor": 4})
    assert placed.fitting("residual", 16) == ("context", "tensor")
    assert placed.fitting("residual", 12) == ("context",)
    assert placed.fitting("residual", 3) == ()


def test_a_dimension_that_does_not_divide_is_named_with_a_layout_that_works() -> None:
    placed = Layout(make_mesh({"fsdp": 2, "tensor": 4}), {"w": ("embed", "mlp"), "v": ("embed", "mlp")})
    shapes = {"w": jax.ShapeDtypeStruct((6, 10), jnp.float32), "v": jax.ShapeDtypeStruct((6, 8), jnp.float32)}
    with pytest.raises(ConfigError) as error:
        placed.check(shapes)
    assert "w: dimension 1 (mlp, 10) does not divide over mesh.tensor 4" in error.value.faults[0]
    words = dict(
        word.removeprefix("mesh.").split("=") for word in error.value.faults[-1].split() if "=" in word
    )
    works = Layout(make_mesh({axis: int(size) for axis, size in words.items()}), placed.param_axes)
    works.check(shapes)


def test_names_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"w: 'mpl' names no axis.*mlp"):
        layout({"fsdp": 8}, w=("embed", "mpl")).check({"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)})
    with pytest.raises(ConfigError, match="names 3 dimensions"):
        layout({"fsdp": 8}, w=("layers", "embed", "mlp")).check(
            {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
        )
    with use_layout(layout({"fsdp": 8})), pytest.raises(ConfigError, match="'btach' names no axis"):
        constrain(jnp.zeros((8, 8)), "btach", None)


def test_constrain_places_an_activation() -> None:
    placed = layout({"data": 2, "context": 2, "tensor": 2})
    with use_layout(placed):
        out = jax.jit(lambda x: constrain(x, "batch", "sequence", "mlp"))(jnp.zeros((4, 4, 4)))
    assert out.sharding.spec == P("data", "context", "tensor")
