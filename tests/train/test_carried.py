"""What error feedback owes, and workers that train apart, after a resume on another mesh or with another codec."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dsjax.checkpoint import DiskCheckpoints
from dsjax.config.exchange import DilocoConfig, GradSyncConfig
from dsjax.grad_sync.residuals import meaning
from dsjax.mesh import named_leaves
from dsjax.pipelining.partition import restacked
from dsjax.train.carried import with_params
from dsjax.train.resume import restore

sys.path.insert(0, str(Path(__file__).parent.parent))
import oracle

INT4 = {"codec": "int4", "min_size": 1, "dense": ["embed/*"]}
PATHS = ("layers/attention/q_proj/kernel", "layers/mlp/down_proj/kernel", "head/kernel")


def program(case, grad_sync, **more):
    made = oracle.program_of({**oracle.PLAIN, **case})
    return replace(made, grad_sync=GradSyncConfig(**grad_sync), **more)


def saved(made, where, steps=2):
    """A state after some steps, in a checkpoint."""
    state = made.init(seed=3)
    for step in range(steps):
        batch = made.place(oracle.batch_of("full", step))
        state, _ = made.step(batch)(state, batch, made.votes())
    checkpoints = DiskCheckpoints(where)
    checkpoints.save(steps, state, made.facts())
    checkpoints.wait()
    return state, checkpoints


def owed(made, state, name, path):
    """[groups, *shape] of the parameter, its layers in order."""
    numbers = meaning(made.parts.exchange, name, path, jax.device_get(state.residuals[name][path]))
    if made.stacking is not None and path.startswith("layers/"):
        numbers = jax.vmap(lambda x: restacked(x, made.stacking.slots, np.arange(5)))(numbers)
    return np.asarray(numbers)


def owed_in_all(made, state, path):
    """By all groups, and by the sums of them where those are coded too."""
    return sum(owed(made, state, name, path).sum(0) for name in state.residuals)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    made = program({"data": 4, "fsdp": 2}, INT4)
    return made, *saved(made, tmp_path_factory.mktemp("carried"))


@pytest.mark.parametrize(
    "case, settings",
    [
        ({"data": 4, "tensor": 2}, INT4),
        ({"data": 4}, {**INT4, "overlap": True, "bucket_bytes": 9000}),
        ({"data": 4, "pipeline": (2, "1f1b")}, {**INT4, "block": 64}),
    ],
)
def test_the_same_replicas_owe_the_same_bit_for_bit(first, case, settings):
    before, state, checkpoints = first
    after = program(case, settings)
    got, facts = restore(after, checkpoints)
    assert "taken over" in facts["notes"][0]
    for name in ("sent", "summed"):
        for path in PATHS:
            want = owed(before, state, name, path)
            assert np.abs(want).max() > 0
            np.testing.assert_array_equal(owed(after, got, name, path), want, err_msg=f"{name} {path}")
    batch = after.place(oracle.batch_of("full", 2))
    assert np.isfinite(float(after.step(batch)(got, batch, after.votes())[1]["loss"]))


def test_as_saved_they_are_read_as_they_are(first):
    before, state, checkpoints = first
    got, facts = restore(before, checkpoints)
    assert facts["notes"] == []
    for name, leaf in named_leaves(state.residuals).items():
        np.testing.assert_array_equal(named_leaves(got.residuals)[name], leaf)


@pytest.mark.parametrize(
    "case, settings",
    [
        ({"data": 2}, INT4),  # sums are coded no longer, and what they owed is owed by those who send
        ({"data": 8}, INT4),
        ({"data": 2}, {**INT4, "codec": "topk"}),
        ({"data": 4}, {**INT4, "codec": "topk"}),
    ],
)
def test_other_replicas_and_codecs_owe_the_same_in_all(first, case, settings):
    before, state, checkpoints = first
    after = program(case, settings)
    got, _ = restore(after, checkpoints)
    for path in PATHS:
        now = owed(after, got, "sent", path)
        assert len(now) == after.parts.exchange.route.outer
        if len(now) != 4:
            np.testing.assert_array_equal(now[0], now[-1])
        want = owed_in_all(before, state, path)
        np.testing.assert_allclose(owed_in_all(after, got, path), want, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({}, "left out"),
        ({**INT4, "error_feedback": False}, "left out"),
        ({**INT4, "hadamard": True}, "begin at 0"),
    ],
)
def test_what_cannot_be_used_is_left_and_told(first, settings, said):
    _, _, checkpoints = first
    after = program({"data": 4, "fsdp": 2}, settings)
    got, facts = restore(after, checkpoints)
    assert said in facts["notes"][0]
    assert not any(np.abs(leaf).max() for leaf in jax.tree.leaves(got.residuals))
    batch = after.place(oracle.batch_of("full", 2))
    after.step(batch)(got, batch, after.votes())


def test_a_checkpoint_without_residuals_starts_them(tmp_path):
    _, checkpoints = saved(program({"data": 2}, {}), tmp_path)
    got, facts = restore(program({"data": 2}, INT4), checkpoints)
    assert "begin at 0" in facts["notes"][0]
    assert not any(np.abs(leaf).max() for leaf in jax.tree.leaves(got.residuals))


def test_layers_in_other_slots_keep_what_they_owe(tmp_path):
    def staged(layers):
        pipeline = oracle.config_of({**oracle.PLAIN, "pipeline": (2, "1f1b")}).pipeline
        return program(
            {"data": 2, "pipeline": (2, "1f1b")},
            INT4,
            pipeline=pipeline.model_copy(update={"layers": layers}),
        )

    before, after = staged([3, 2]), staged([2, 3])
    state, checkpoints = saved(before, tmp_path)
    got, _ = restore(after, checkpoints)
    for path in PATHS:
        np.testing.assert_array_equal(owed(after, got, "sent", path), owed(before, state, "sent", path))


APART = {"diloco": DilocoConfig(inner_steps=3)}


@pytest.mark.parametrize(
    "before, after",
    [({}, APART), (APART, {})],
    ids=["gradients to moves", "moves to gradients"],
)
def test_what_gradients_owe_is_not_what_moves_owe(tmp_path, before, after):
    steps = 3 if before else 2  # a meeting leaves residuals of moves
    state, checkpoints = saved(program({"data": 2}, INT4, **before), tmp_path, steps)
    assert any(np.abs(leaf).max() for leaf in jax.tree.leaves(state.residuals))
    got, facts = restore(program({"data": 2}, INT4, **after), checkpoints)
    assert any("begin at 0: those of gradients" in note for note in facts["notes"])
    assert not any(np.abs(leaf).max() for leaf in jax.tree.leaves(got.residuals))


@pytest.mark.parametrize(
    "case", [{"data": 4}, {"fsdp": 4}, {"pipeline": (2, "1f1b")}], ids=["data", "fsdp", "pipeline"]
)
def test_one_goes_on_with_all_that_workers_learned(tmp_path, case):
    state, checkpoints = saved(program({"data": 4}, {}, **APART), tmp_path)
    after = program(case, {}, **(APART if "fsdp" in case else {}))
    got, facts = restore(after, checkpoints)
    assert "goes on as one with the mean" in facts["notes"][0] and "4 workers" in facts["notes"][0]
    assert after.workers is None and not got.workers
    learned = named_leaves(state.workers["params"])
    now = named_leaves(after.in_order(got.params))
    met = named_leaves(state.params)
    for name in ("head/kernel", "layers/mlp/up_proj/kernel"):
        mean = np.asarray(learned[name]).mean(0)
        assert np.abs(mean - np.asarray(met[name])).max() > 1e-5
        np.testing.assert_allclose(now[name], mean, rtol=1e-6, atol=1e-9, err_msg=name)
    batch = after.place(oracle.batch_of("full", 2))
    after.step(batch)(got, batch, after.votes())


@pytest.mark.parametrize("replicas", [2, 4])
def test_workers_begin_with_the_mean_of_what_they_had(tmp_path, replicas):
    before = program({"data": 4}, {}, **APART)
    state, checkpoints = saved(before, tmp_path)
    after = program({"data": replicas}, {}, **APART)
    got, facts = restore(after, checkpoints)
    assert after.workers == replicas
    told = (
        "2 workers begin with the mean of the parameters and optimizers of the 4 workers that trained apart"
    )
    assert facts["notes"] == ([told] if replicas == 2 else [])
    moments = [np.asarray(named_leaves(s.opt_state)["0/trace/head/kernel"]) for s in (state, got)]
    np.testing.assert_allclose(moments[1].mean(0), moments[0].mean(0), rtol=1e-5, atol=1e-9)
    np.testing.assert_array_equal(*(named_leaves(s.params)["head/kernel"] for s in (state, got)))
    batch = after.place(oracle.batch_of("full", 2))
    after.step(batch)(got, batch, after.votes())


def test_workers_begin_from_a_run_that_had_none(tmp_path):
    _, checkpoints = saved(program({"data": 2}, {}), tmp_path)
    after = program({"data": 2}, {}, **APART)
    got, facts = restore(after, checkpoints)
    assert facts["notes"] == ["2 workers begin to train apart, from what all had"]
    own = named_leaves(got.workers["params"])["head/kernel"]
    np.testing.assert_array_equal(own[1], named_leaves(got.params)["head/kernel"])
    batch = after.place(oracle.batch_of("full", 2))
    after.step(batch)(got, batch, after.votes())


def test_workers_begin_from_a_pipeline_with_its_layers_in_order(tmp_path):
    pipeline = oracle.config_of({**oracle.PLAIN, "pipeline": (2, "1f1b")}).pipeline
    pipeline = pipeline.model_copy(update={"layers": [2, 3]})
    before = program({"pipeline": (2, "1f1b")}, {}, pipeline=pipeline)
    state, checkpoints = saved(before, tmp_path)
    after = program({"data": 2}, {}, **APART)
    got, _ = restore(after, checkpoints)
    for name in ("params/layers/mlp/up_proj/kernel", "opt_state/0/trace/layers/mlp/up_proj/kernel"):
        want = named_leaves(before.in_order(state))[name]
        now = named_leaves(got)[name]
        np.testing.assert_array_equal(now[1] if name.startswith("opt") else now, want, err_msg=name)
    np.testing.assert_array_equal(
        named_leaves(got.workers)["params/layers/mlp/up_proj/kernel"][1],
        named_leaves(got.params)["layers/mlp/up_proj/kernel"],
    )


def test_workers_begin_with_the_parameters_that_they_are_given():
    made = program({"data": 2}, {}, **APART)
    state = made.init(seed=3)
    given = jax.tree.map(lambda leaf: leaf + 1, state.params)
    begun = with_params(made, state, given)
    own = named_leaves(begun.workers["params"])["head/kernel"]
    np.testing.assert_array_equal(own[1], named_leaves(given)["head/kernel"])
    batch = made.place(oracle.batch_of("full", 0))
    made.step(batch)(begun, batch, made.votes())
