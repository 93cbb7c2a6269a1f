"""What the exchange does with bad numbers and with settings that have nothing to do."""

from __future__ import annotations

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
from dsjax.config import from_dict
from dsjax.config.exchange import GradSyncConfig
from dsjax.errors import ConfigError
from dsjax.mesh import named_leaves

sys.path.insert(0, str(Path(__file__).parent.parent))
import oracle


def program(case, **settings):
    made = oracle.program_of({**oracle.PLAIN, "layers": 2, **case})
    return replace(made, grad_sync=GradSyncConfig(**{"min_size": 1, "dense": [], **settings}))


@pytest.mark.parametrize("codec", ["int4", "e2m4", "topk"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_numbers_that_are_not_finite_are_seen_and_owed_to_nobody(codec, bad):
    made = program({"data": 2, "fsdp": 2}, codec=codec)
    state = made.init(seed=3)
    batch = made.place(oracle.batch_of("full", 0))
    state, metrics = made.step(batch)(state, batch, made.votes())
    assert bool(metrics["applied"])
    before = jax.device_get(state)
    weights = np.array(jax.device_get(batch["weights"]))
    weights[0, -1, 3] = bad  # the last replica's own
    poisoned = {**batch, "weights": jax.device_put(weights, batch["weights"].sharding)}
    state, metrics = made.step(poisoned)(state, poisoned, made.votes())
    assert not bool(metrics["applied"])
    for part in ("params", "opt_state", "residuals"):
        for name, leaf in named_leaves(getattr(state, part)).items():
            np.testing.assert_array_equal(leaf, named_leaves(getattr(before, part))[name], err_msg=name)


def test_one_replica_has_nothing_to_code_and_is_told_so():
    made = program({"fsdp": 2}, codec="int4")
    assert made.parts.exchange is None
    assert made.notes == [
        "grad_sync.codec: int4 has nothing to do, as there is one replica (mesh.data is 1): gradients are summed "
        "over fsdp as they are"
    ]
    assert not jax.tree.leaves(made.abstract_state.residuals)


def test_what_is_chosen_is_told():
    made = program({"data": 4}, codec="int4", dense=["embed/*"], topology={"node": {"devices": 2}})
    (note,) = made.notes
    assert (
        note.startswith("gradients: int4 on 87% of the numbers")
        and "error feedback, route hierarchical (2 x 2 replicas)" in note
    )
    assert program({"data": 4}).notes == []


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"hadamard": True}, "grad_sync: hadamard has no effect with codec dense"),
        (
            {"codec": "topk", "stochastic": True, "block": 64},
            "grad_sync: block, stochastic have no effect with codec topk",
        ),
        ({"overlap": True}, None),
        ({"overlap": False}, None),
        ({"codec": "int4", "hadamard": True, "stochastic": True, "block": 64, "feedback_decay": 0.5}, None),
    ],
)
def test_what_is_set_and_does_nothing_is_told(settings, said):
    notes = [note for note in program({"data": 2}, **settings).notes if "no effect" in note]
    assert notes == ([said] if said else [])


def test_groups_of_layers_in_a_pipeline_are_told_to_do_nothing():
    made = program({"data": 2, "pipeline": (2, "1f1b")}, overlap=True)
    assert sum("overlap has no effect with a pipeline" in note for note in made.notes) == 1


def test_an_exchange_that_the_compiler_makes_heeds_no_settings():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)

    def notes(**settings):
        made = dsjax.Trainer(
            init=lambda rngs: Net(rngs), loss=lambda model, batch: (jnp.sum(model.norm(batch["x"])), 1.0),
            optimizer=optax.sgd(0.1), mesh={"data": 2}, devices=jax.devices()[:2], grad_sync=settings,
        )  # fmt: skip
        return [note for note in made.notes if "no effect" in note]

    (said,) = notes(dense_dtype="bfloat16", route="flat")
    assert said.startswith("grad_sync: dense_dtype, route have no effect") and "BatchNorm" in said
    assert notes() == []


@pytest.mark.parametrize(
    "settings, faults",
    [
        ({"block": 8192}, ["grad_sync.block: takes a power of two from 16 to 4096, got 8192"]),
        ({"topology": 3}, ["grad_sync.topology: takes a mapping of levels to numbers of devices, got 3"]),
        ({"topology": [4]}, ["grad_sync.topology: takes a mapping of levels to numbers of devices, got [4]"]),
        (
            {"topology": {"node": 8, "rack": 4}},
            [
                "grad_sync.topology.rack: 4 devices is not a multiple of the level before it (8); name the smallest "
                "groups first"
            ],
        ),
        (
            {"block": 8, "fraction": 1.5},
            [
                "grad_sync.block: takes a power of two from 16 to 4096, got 8",
                "grad_sync.fraction: takes a number above 0, at most 1, got 1.5",
            ],
        ),
    ],
)
def test_a_fault_names_the_whole_key_and_what_it_takes(settings, faults):
    with pytest.raises(ConfigError) as caught:
        from_dict({"grad_sync": settings})
    assert caught.value.faults == faults


@pytest.mark.parametrize("codec", ["int8", "int4", "e2m4", "topk_int4"])
def test_the_largest_block_is_exchanged(codec):
    made = program({"data": 2}, codec=codec, block=4096)
    state = made.init(seed=3)
    batch = made.place(oracle.batch_of("full", 0))
    assert bool(made.step(batch)(state, batch, made.votes())[1]["applied"])


@pytest.mark.parametrize(
    "settings, fault",
    [
        ({"codec": "int3"}, "grad_sync.codec"),
        ({"block": 100}, "power of two"),
        ({"fraction": 0}, "grad_sync.fraction"),
        ({"topology": {"rack": 8, "node": 4}}, "smallest groups first"),
        ({"topology": {"node": "eight"}}, "a number of devices"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, fault):
    with pytest.raises(ConfigError) as caught:
        from_dict({"grad_sync": settings})
    assert fault in "\n".join(caught.value.faults)


def test_a_topology_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="groups of 3"):
        program({"data": 4}, topology={"node": {"devices": 3}})


def test_small_parameters_vectors_and_embeddings_stay_dense():
    made = oracle.program_of({**oracle.PLAIN, "data": 2})
    settings = GradSyncConfig(codec="int4", min_size=6000)
    tensors = replace(made, grad_sync=settings).parts.exchange.tensors
    coded = {path for path, tensor in tensors.items() if tensor.coded}
    assert "layers/mlp/up_proj/kernel" in coded
    assert not any("norm" in path or "embed" in path or path == "head/kernel" for path in coded)


def test_rounding_by_chance_draws_anew_at_every_step_and_is_right_on_average():
    def sums(**settings):
        made = program({"data": 2}, error_feedback=False, codec="int4", **settings)
        state, found = made.init(seed=3), []
        for _ in range(12):
            batch = made.place(oracle.batch_of("full", 0))
            again = replace(state, step=state.step + len(found))
            again, _ = made.step(batch)(jax.tree.map(lambda x: x.copy(), again), batch, made.votes())
            found.append(np.asarray(named_leaves(again.opt_state[0].trace)["layers/mlp/up_proj/kernel"]))
        return np.stack(found)

    exact = program({"data": 2}, codec="dense")
    batch = exact.place(oracle.batch_of("full", 0))
    state, _ = exact.step(batch)(exact.init(seed=3), batch, exact.votes())
    want = np.asarray(named_leaves(state.opt_state[0].trace)["layers/mlp/up_proj/kernel"])
    nearest, drawn = sums(), sums(stochastic=True)
    np.testing.assert_array_equal(nearest[0], nearest[1])
    assert np.mean(drawn[0] != drawn[1]) > 0.1
    # One draw is worse than the nearest number; the mean of twelve is better.
    off = [np.linalg.norm(x - want) for x in (nearest[0], drawn[0], drawn.mean(0))]
    assert off[2] < off[0] < off[1]
