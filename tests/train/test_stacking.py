"""Layers in slots: which leaves are the stack's, and checkpoints of other depths."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dsjax
from dsjax.train.stacking import Found, Stack
from dsjax.train.stage_costs import Costs

sys.path.insert(0, str(Path(__file__).parent.parent))
import oracle


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)


class Tail(nnx.Module):
    """Holds a stack of its own, as deep as the model's and of the same name."""

    def __init__(self, depth, *, rngs):
        self.layers = dsjax.stacked(lambda rngs: Layer(rngs=rngs), depth, rngs)


class Net(nnx.Module):
    def __init__(self, depth, *, rngs):
        self.layers = dsjax.stacked(lambda rngs: Layer(rngs=rngs), depth, rngs)
        self.tail = Tail(depth, rngs=rngs)


def _head(model, x, batch):
    for kernel in model.tail.layers.linear.kernel[...]:
        x = x + jnp.tanh(x @ kernel)
    return jnp.sum(x**2), jnp.float32(x.shape[0])


def _trainer(place, stages, depth=5, **pipeline):
    return dsjax.Trainer(
        init=lambda rngs: Net(depth, rngs=rngs),
        stages=dsjax.Stages(
            embed=lambda model, batch: batch["x"],
            layer=lambda layer, x, batch: x + jnp.tanh(layer.linear(x)),
            head=_head,
        ),
        optimizer=optax.adam,
        learning_rate=1e-2,
        mesh={"pipeline": stages},
        devices=jax.devices()[:stages],
        pipeline={"microbatches": 2, **pipeline},
        run={"dir": str(place)},
    )


def test_another_stack_of_the_same_name_stays_as_it_is(tmp_path):
    batch = {"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)}
    losses = []
    for stages in (1, 2):
        trainer = _trainer(tmp_path / str(stages), stages, layers=[2, 3])
        state = trainer.init()
        for _ in range(3):
            state, metrics = trainer.step(state, batch)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-5)
    assert state.params["tail"]["layers"]["linear"]["kernel"][...].shape[0] == 5
    assert state.params["layers"]["linear"]["kernel"][...].shape[0] == 6


def test_a_checkpoint_of_another_depth_is_refused(tmp_path):
    trainer = _trainer(tmp_path, 2, layers=[3, 2])
    trainer.save(trainer.init())
    # Six layers lie in as many slots as five of which one stage has fewer.
    for stages, depth in [(2, 3), (2, 6), (2, 7), (1, 6), (1, 3)]:
        with pytest.raises(dsjax.InputError, match="does not match this model"):
            _trainer(tmp_path, stages, depth).restore()


def test_a_leaf_belongs_to_the_variable_whose_name_it_ends_with():
    stack = Stack("layers", frozenset({"layers/w", "tail/layers/w", "b"}))
    assert stack.holds("layers/w", (4, 2), 4) and stack.holds("opt_state/0/mu/layers/w", (4, 2), 4)
    assert not stack.holds("opt_state/0/mu/tail/layers/w", (4, 2), 4)
    assert (
        not stack.holds("layers/w", (5, 2), 4)
        and not stack.holds("b", (4,), 4)
        and not stack.holds("step", (), 4)
    )


@pytest.fixture(scope="module")
def staged():
    made = oracle.program_of({**oracle.PLAIN, "pipeline": (2, "1f1b")})
    return replace(made, found=Found((2, 3), 4, (4, 16)))


def as_saved(program):
    return json.loads(json.dumps(program.facts()))


def test_what_balancing_found_is_written_down_and_taken_up_again(staged):
    assert (staged.microbatches, staged.stacking.partition.counts) == (4, (2, 3))
    again = replace(staged, found=Found())
    assert again.microbatches == 8 and as_saved(again)["balanced"] is None
    now = again.going_on(as_saved(staged))
    assert now.found == staged.found and now.microbatches == 4
    # What another checkpoint's run had not found is not kept from the one before.
    assert now.going_on(as_saved(again)).found == Found()
    # Layers that lie in order are found too.
    deep = oracle.program_of({**oracle.PLAIN, "layers": 16, "pipeline": (2, "1f1b")})
    heavy = replace(deep, costs=Costs(1.0, 0.0, 9.0))
    assert heavy.stacking.partition.counts == (9, 7)
    even = replace(heavy, found=Found((8, 8)))
    assert heavy.going_on(as_saved(even)).stacking.partition.counts == (8, 8)


@pytest.mark.parametrize(
    "pipeline, more, kept",
    [
        ({"layers": [3, 2]}, {}, Found(None, 4, (4, 16))),
        ({"microbatches": 2}, {}, Found((2, 3))),
        ({"schedule": "gpipe"}, {}, Found((2, 3))),
        ({"virtual_stages": 2, "schedule": "interleaved"}, {}, Found()),
        ({}, {"rows_a_pass": 16}, Found((2, 3))),
    ],
    ids=["layers set", "microbatches set", "another schedule", "other stages", "other rows"],
)
def test_only_what_still_holds_is_taken_up(staged, pipeline, more, kept):
    other = replace(staged, pipeline=staged.pipeline.model_copy(update=pipeline), found=Found(), **more)
    assert other.going_on(as_saved(staged)).found == kept
