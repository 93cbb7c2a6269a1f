"""The weight map engine: both ways bit for bit, any box alone, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from dsjax.errors import InputError
from dsjax.models.weights import Box, Entry, WeightMap

LAYERS, D, N, H = 3, 6, 4, 5
SHAPES = {
    "q": (LAYERS, D, N, H),
    "k": (LAYERS, D, 2, H),
    "embed": (16, D),
    "mixed": (LAYERS, 2, D, 2 * H),
    "norm": (D,),
}
ENTRIES = [
    Entry("q", "h.{layer}.qk", "d n h -> d (n h)", part=(1, 0, 30), first=1),
    Entry("k", "h.{layer}.qk", "d n h -> d (n h)", part=(1, 20, 30), first=1),
    Entry("embed", "embed", "v d", {"v": 7}),
    Entry("mixed", "h.{layer}.of.{expert}", "d (t h) -> (h t) d", {"t": 2}),
    Entry("norm", "norm", "d"),
    Entry("head", "head", "d v -> v d"),  # the model has none
]


@pytest.fixture
def own() -> WeightMap:
    return WeightMap(ENTRIES, SHAPES)


def drawn(weights: WeightMap) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float16) for name, shape in weights.tensors.items()}


def cut(arrays: dict[str, Any]) -> Any:
    return lambda name, box: arrays[name][tuple(slice(*span) for span in box)]


def test_both_ways_is_the_same_to_the_bit_and_padding_is_zero(own: WeightMap) -> None:
    tensors = drawn(own)
    params = own.from_theirs(tensors)
    assert {path: value.shape for path, value in params.items()} == SHAPES
    assert not params["embed"][7:].any()
    np.testing.assert_array_equal(params["q"][1].reshape(D, -1), tensors["h.2.qk"][:, :20])
    np.testing.assert_array_equal(params["k"][1].reshape(D, -1), tensors["h.2.qk"][:, 20:])
    mixed = tensors["h.2.of.1"].reshape(H, 2, D).transpose(2, 1, 0).reshape(D, 2 * H)
    np.testing.assert_array_equal(params["mixed"][2, 1], mixed)
    params["embed"][7:] = 9
    back = own.to_theirs(params)
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype
        np.testing.assert_array_equal(back[name], value)


def test_any_box_of_a_parameter_is_read_alone(own: WeightMap) -> None:
    tensors = drawn(own)
    params = own.from_theirs(tensors)
    draw = random.Random(0)
    for _ in range(1000):
        path = draw.choice(list(SHAPES))
        box: Box = tuple((a := draw.randrange(n), draw.randrange(a + 1, n + 1)) for n in SHAPES[path])
        np.testing.assert_array_equal(own.parameter(path, cut(tensors), box), cut(params)(path, box))


def test_of_a_slice_no_more_is_read_than_it_needs(own: WeightMap) -> None:
    (piece,) = own.pieces("q", ((2, 3), (0, 3), (1, 3), (0, H)))
    assert (piece.tensor, piece.box) == ("h.3.qk", ((0, 3), (H, 3 * H)))
    assert piece.place == ((0, 1), (0, 3), (0, 2), (0, H))
    assert own.pieces("embed", ((8, 16), (0, D))) == []


def test_tensors_that_do_not_fit_are_named(own: WeightMap) -> None:
    tensors = drawn(own)
    tensors["extra"] = tensors.pop("norm")
    tensors["embed"] = tensors["embed"][:5]
    with pytest.raises(InputError) as raised:
        own.from_theirs(tensors)
    assert raised.value.faults == [
        "weights: embed has shape [5, 6], the model's config makes it [7, 6]",
        "weights: extra is no tensor of this model (shape [6])",
        "weights: norm is missing; the model needs it, of shape [6]",
    ]


def test_a_prefix_may_be_left_out_and_buffers_are_ignored() -> None:
    weights = WeightMap([Entry("norm", "model.norm", "d")], {"norm": (2,)}, ["model.*.inv_freq"], "model.")
    assert weights.names({"norm": (2,), "rope.inv_freq": (1,)}) == {"model.norm": "norm"}
    assert weights.names({"model.norm": (2,)}) == {"model.norm": "model.norm"}


def test_a_parameter_without_an_entry_is_a_fault_of_the_map() -> None:
    with pytest.raises(ValueError, match="no entry for bias"):
        WeightMap([Entry("norm", "norm", "d")], {"norm": (2,), "bias": (2,)})
