"""Layers on stages: the balanced partition is the best there is, and a stack finds its way into slots and back."""

from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.errors import ConfigError
from dsjax.pipelining.partition import Partition, balanced, even, restacked, sizes_of, told


def partitions(layers, parts):
    """Counts of every way to cut so many layers into parts, none of them empty."""
    for cuts in combinations(range(1, layers), parts - 1):
        ends = (0, *cuts, layers)
        yield tuple(b - a for a, b in pairwise(ends))


def times(counts, costs, stages, first, last, pace):
    """Time of each virtual stage."""
    ends = np.cumsum((0, *counts))
    sums = [float(np.sum(costs[a:b])) for a, b in pairwise(ends)]
    sums[0] += first
    sums[-1] += last
    return [pace[k % stages] * time for k, time in enumerate(sums)]


@pytest.mark.parametrize("seed", range(30))
def test_the_balanced_partition_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    layers, stages, virtual = int(rng.integers(4, 10)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    if layers < stages * virtual:
        virtual = 1
    costs = rng.uniform(0.5, 2.0, layers)
    first, last = rng.uniform(0, 3, 2) * (seed % 3 > 0)
    pace = rng.uniform(0.7, 1.5, stages) if seed % 2 else np.ones(stages)

    def slowest(counts):
        return max(times(counts, costs, stages, first, last, pace))

    found = balanced(list(costs), stages, virtual, first=first, last=last, pace=list(pace))
    assert (found.stages, found.virtual, found.layers) == (stages, virtual, layers)
    assert min(found.counts) >= 1
    best = min(map(slowest, partitions(layers, stages * virtual)))
    assert slowest(found.counts) == pytest.approx(best, rel=1e-12)


def test_of_equally_fast_partitions_the_even_one_is_taken():
    # One long layer sets the time, so that the rest may lie anyhow: 5, 3+1+1, ... would be as fast.
    assert balanced([5.0, 1.0, 1.0, 1.0, 1.0], 3).counts == (1, 2, 2)


@pytest.mark.parametrize(
    ("extra", "counts"), [({"first": 2.0}, (2, 4)), ({"last": 2.0}, (4, 2)), ({}, (3, 3))]
)
def test_the_embedding_and_the_head_weigh_like_layers(extra, counts):
    assert balanced([1.0] * 6, 2, **extra).counts == counts


def test_a_slow_stage_gets_fewer_layers():
    assert balanced([1.0] * 6, 2, pace=[1.0, 2.0]).counts == (4, 2)


@pytest.mark.parametrize(
    ("layers", "stages", "virtual", "counts"),
    [(8, 4, 1, (2, 2, 2, 2)), (5, 4, 1, (1, 2, 1, 1)), (7, 4, 1, (2, 2, 2, 1)), (3, 2, 1, (2, 1)),
     (5, 2, 2, (1, 2, 1, 1)), (6, 4, 1, (1, 2, 2, 1)), (3, 1, 1, (3,))],
)  # fmt: skip
def test_what_does_not_divide_is_spared_at_the_ends(layers, stages, virtual, counts):
    assert even(layers, stages, virtual).counts == counts


def test_every_even_partition_differs_by_one_layer_at_most():
    for stages in range(1, 6):
        for virtual in (1, 2, 3):
            for layers in range(stages * virtual, 30):
                counts = even(layers, stages, virtual).counts
                assert sum(counts) == layers and max(counts) - min(counts) <= 1
                assert counts[-1] == min(counts)


@pytest.mark.parametrize(
    ("layers", "virtual", "works"),
    [
        (3, 1, "use a mesh.pipeline of at most 3"),
        (3, 2, "use mesh.pipeline=1"),
        (1, 1, "use mesh.pipeline=1"),
        (6, 2, "use pipeline.schedule=1f1b or a mesh.pipeline of at most 3"),
        (10, 3, "use pipeline.virtual_stages=2 or a mesh.pipeline of at most 3"),
    ],
)
def test_too_few_layers_are_refused_with_what_works(layers, virtual, works):
    with pytest.raises(ConfigError) as refused:
        even(layers, 4, virtual)
    assert len(refused.value.faults) == 1
    assert f"need {4 * virtual} layers, the model has {layers}" in str(refused.value)
    assert str(refused.value).endswith(works)


def test_slots_stand_stage_by_stage_and_in_a_stage_chunk_by_chunk():
    uneven = Partition(2, 2, (2, 1, 1, 2))
    # Virtual stages 0 and 2 lie on stage 0, 1 and 3 on stage 1; layers 0 1 | 2 | 3 | 4 5.
    assert uneven.slots.tolist() == [0, 1, 3, -1, 2, -1, 4, 5]
    assert [uneven.of_stage(0), uneven.of_stage(1)] == [3, 3]
    assert not uneven.in_order and not Partition(2, 2, (1, 1, 1, 1)).in_order
    assert Partition(2, 1, (3, 3)).in_order and not Partition(2, 1, (3, 2)).in_order


PARTITIONS = [
    Partition(4, 1, (1, 2, 1, 1)),
    Partition(2, 1, (1, 4)),
    Partition(1, 1, (5,)),
    Partition(2, 2, (1, 2, 1, 1)),
]


@pytest.mark.parametrize("held", PARTITIONS, ids=told)
@pytest.mark.parametrize("wanted", PARTITIONS, ids=told)
def test_a_stack_moves_between_any_two_partitions(held, wanted):
    order = np.arange(5)
    stack = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
    stored = restacked(stack, order, held.slots)
    assert stored.shape == (held.stages * held.virtual * held.depth, 3)
    moved = restacked(stored, held.slots, wanted.slots)
    for slot, layer in enumerate(wanted.slots):
        np.testing.assert_array_equal(moved[slot], stack[layer] if layer >= 0 else np.zeros(3))
    np.testing.assert_array_equal(restacked(moved, wanted.slots, order), stack)


def test_unused_slots_of_integers_and_flags_are_zeros_and_random_keys_stay_keys():
    slots = Partition(2, 1, (1, 2)).slots
    assert restacked(jnp.arange(1, 4), np.arange(3), slots).tolist() == [1, 0, 2, 3]
    assert restacked(jnp.ones((3, 2), bool), np.arange(3), slots)[1].tolist() == [False, False]
    keys = jax.random.split(jax.random.key(0), 3)
    back = restacked(restacked(keys, np.arange(3), slots), slots, np.arange(3))
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))


def test_layers_are_told_stage_by_stage():
    assert told(Partition(4, 1, (1, 2, 1, 1))) == "1+2+1+1"
    assert told(Partition(2, 2, (1, 2, 3, 4))) == "1+3 | 2+4"


def test_the_number_of_layers_is_their_leading_dimension():
    assert sizes_of({"a": np.zeros((4, 2)), "b": np.zeros(4)}) == 4
    with pytest.raises(ConfigError, match=r"differ in their leading dimension \(a 4, b 3\); .*dsjax.stacked"):
        sizes_of({"a": np.zeros((4, 2)), "b": np.zeros(3)})
    with pytest.raises(ConfigError, match="no parameters"):
        sizes_of({})
