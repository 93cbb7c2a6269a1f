"""Plans of the framework's own step, compiled: for simulated CPU devices everywhere, for GPUs where that can be."""

from __future__ import annotations

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plan_runs import small
from rich.console import Console

import dsjax
from dsjax import aot
from dsjax.config import from_dict
from dsjax.errors import ConfigError
from dsjax.mesh import make_mesh
from dsjax.plan import explain_recipe, fit, plan, plan_recipe, report
from dsjax.plan.compiled import describe, memory_limit, vocabulary
from dsjax.plan.settings import with_settings
from dsjax.plan.show import page, show


@pytest.fixture(scope="module")
def planned():
    return plan(small({"data": 2, "fsdp": 4}, gradient_accumulation_steps=2), "cpu:8", tokens=1e9)


def test_a_plan_knows_what_the_live_arrays_take(planned):
    config = small({"data": 2, "fsdp": 4}, gradient_accumulation_steps=2)
    program = describe(config, aot.parse_target("cpu:8"), None).program
    state = program.init(0)
    held = {name: _bytes_on(jax.devices()[0], tree) for name, tree in {
        "parameters": state.params, "optimizer": state.opt_state}.items()}  # fmt: skip
    assert (planned.memory.parameters, planned.memory.optimizer) == tuple(held.values())
    rows = {"tokens": np.zeros((16, 128), np.int32)}
    assert planned.memory.batch == 5 * _bytes_on(jax.devices()[0], program.place(rows))
    memory = planned.memory
    parts = (
        memory.parameters,
        memory.gradients,
        memory.optimizer,
        memory.activations,
        memory.batch,
        memory.exchange,
        memory.other,
    )
    assert sum(parts) == memory.total and planned.fits
    assert memory.headroom == memory.limit - memory.total == 4_000_000_000 - memory.total


def _bytes_on(device, tree):
    return sum(
        shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards
        if shard.device == device
    )  # fmt: skip


def test_a_plan_tells_collectives_times_and_money(planned):
    kinds = {(t.kind, t.axes) for t in planned.traffic}
    assert ("all-gather", ("fsdp",)) in kinds and any("data" in axes for _, axes in kinds)
    assert all(0 <= t.hidden <= t.seconds for t in planned.traffic) and 0 <= planned.hidden_share <= 1
    forecast, roofline = planned.forecast, planned.roofline
    assert forecast.step_seconds == pytest.approx(forecast.compute_seconds + forecast.exposed_seconds)
    assert forecast.step_seconds >= max(roofline.compute, roofline.memory, roofline.node)
    assert forecast.tokens_per_second == pytest.approx(16 * 128 / forecast.step_seconds)
    assert forecast.days == pytest.approx(1e9 / forecast.tokens_per_second / 86400)
    assert forecast.dollars == pytest.approx(forecast.days * 24 * 8 * 0.03)
    assert planned.flops.hardware > 0.9 * planned.flops.model > 0
    assert forecast.mfu == pytest.approx(planned.flops.model / (forecast.step_seconds * 8 * 50e9))


def test_what_workers_send_when_they_meet_is_shared_out_over_the_steps_between():
    def planned(inner_steps):
        values = small({"data": 8}).model_dump()
        return plan(from_dict({**values, "diloco": {"inner_steps": inner_steps}}), "cpu:8")

    often, seldom = planned(2), planned(20)

    def meeting(found, every):
        return sum(t.sent for t in found.traffic if t.every == every)

    assert meeting(often, 2) == pytest.approx(10 * meeting(seldom, 20)) and meeting(seldom, 20) > 0
    # The rest are the metrics' sums.
    assert meeting(often, 1) == meeting(seldom, 1) < 1000
    assert seldom.forecast.step_seconds < often.forecast.step_seconds
    assert seldom.roofline.node < often.roofline.node
    console = Console(file=io.StringIO(), width=110)
    show(seldom, console)
    assert "1 in 20 steps" in console.file.getvalue()


def test_a_plan_can_be_printed_stored_and_read_as_a_page(planned):
    console = Console(file=io.StringIO(), width=110)
    show(planned, console)
    text = console.file.getvalue()
    assert "cpu:8, data 2 x fsdp 4: fits" in text and "all-gather" in text and "exposed" in text
    again = json.loads(json.dumps(planned.as_dict()))
    assert again["memory"]["total"] == planned.memory.total and again["fits"] is True
    odd = dataclasses.replace(planned, notes=("<script>",))
    assert "<script>" not in page(odd) and "&lt;script&gt;" in page(odd) and "http" not in page(odd)


def test_any_jitted_function_has_a_report():
    target = aot.parse_target("cpu:8")
    mesh = make_mesh({"fsdp": 8}, target.devices())
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp"))
    x = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=sharding)
    found = report(jax.jit(lambda x: x @ x.T), (x,), target, model_flops=2 * 64**3)
    assert found.flops.hardware == 2 * 64**3 and found.memory.total >= 64 * 64 * 4 / 8
    assert [t.kind for t in found.traffic] == ["all-reduce"] and found.forecast.mfu > 0


def test_a_trainers_own_model_has_a_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = dsjax.Trainer(
        init=lambda rngs: nnx.Linear(64, 8, rngs=rngs),
        loss=lambda model, batch: (jnp.sum(model(batch["x"]) ** 2), batch["x"].shape[0]),
        optimizer=lambda lr: optax.adamw(lr),
        learning_rate=1e-3,
        mesh={"fsdp": -1},
        gradient_accumulation_steps=2,
    )
    batch = {"x": np.zeros((16, 64), np.float32)}
    found = plan_recipe(trainer.program.recipe, trainer.config, batch, "cpu:4")
    assert found.mesh == {"fsdp": 4} and found.memory.batch == 16 * 64 * 4 // 4
    assert found.memory.parameters >= (64 * 8 + 8) * 4 // 4 and found.forecast.mfu is None
    again, explained = explain_recipe(trainer.program.recipe, trainer.config, batch, "cpu:4")
    assert again.memory == found.memory and explained.compiled
    assert explained.product_flops == pytest.approx(again.flops.hardware / 4)
    with pytest.raises(ConfigError, match=r"a multiple of 8 .* got 12"):
        plan_recipe(trainer.program.recipe, trainer.config, {"x": batch["x"][:12]}, "cpu:4")


@pytest.mark.parametrize(
    ("mesh", "on", "line"),
    [
        ({"data": 4, "fsdp": 4}, "8xH100", "8xH100: mesh: data 4 x fsdp 4 is 16 devices but there are 8"),
        ({}, "8xH1000", "no chip is called H1000; did you mean H100?"),
        ({"fsdp": 32}, "4x8xH100", "train.global_batch_size: 16 does not divide over 32 shards"),
    ],
)
def test_what_does_not_match_the_cluster_is_one_line(mesh, on, line):
    with pytest.raises(ConfigError) as refused:
        plan(small(mesh), on)
    assert len(refused.value.faults) == 1 and line in refused.value.faults[0]
    assert "CPU" not in refused.value.faults[0]


def test_without_the_compiler_the_plan_is_by_formulas_and_says_so(monkeypatch):
    monkeypatch.setattr(aot, "missing_for", lambda kind: f"needs a wheel: {aot.INSTALL_AOT}")
    found = plan(small({"fsdp": 8}), "8xH100")
    assert not found.compiled and found.flops.hardware is None and found.forecast.step_seconds > 0
    assert "NOT COMPILED" in found.notes[0] and aot.INSTALL_AOT in found.notes[0]
    console = Console(file=io.StringIO(), width=110)
    show(found, console)
    assert "NOT COMPILED" in console.file.getvalue() and "NOT COMPILED" in page(found)


def test_what_does_not_fit_gets_settings_that_were_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "_ENOUGH", 1)
    tiny = tmp_path / "chips.yaml"
    tiny.write_text("cpu:\n  memory: {bytes: 57000000}\n")
    config = small({"data": 4, "fsdp": 1})
    found = plan(config, "cpu:4", chips=tiny)
    assert not found.fits and len(found.changes) == 1
    change = found.changes[0]
    again = with_settings(config, {k: _typed(v) for k, v in (w.split("=") for w in change.settings.split())})
    assert plan(again, "cpu:4", chips=tiny).memory.total == change.total <= 57_000_000
    described = describe(config, aot.parse_target("cpu:4"), None)
    assert fit.changes_that_fit(described, lambda other: None) == ()  # what cannot be placed is not proposed


def _typed(text):
    return int(text) if text.isdigit() else text


def test_jax_takes_three_quarters_of_a_gpu_unless_told():
    h100 = aot.parse_target("8xH100")
    assert memory_limit(h100, {}) == int(0.75 * h100.chip.memory.bytes)
    assert memory_limit(h100, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}) == int(0.9 * h100.chip.memory.bytes)
    with pytest.raises(ConfigError, match="takes a share"):
        memory_limit(h100, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "9"})


def test_the_vocabulary_is_the_models_or_the_tokenizers():
    from dsjax.config import from_dict

    assert vocabulary(small()) is None
    sizes = {"data": {"tokenizer": "bytes"}}
    assert vocabulary(from_dict(sizes)) == 258
    bpe = {"data": {"kind": "text", "paths": "nowhere", "tokenizer": "bpe", "bpe_vocab_size": 512}}
    assert vocabulary(from_dict(bpe)) == 512


def test_a_step_is_planned_for_two_nodes_of_gpus(gpu_compiler):
    found = plan(small({"data": 2, "fsdp": 8}), "2x8xH100")
    links = {t.axes: t.link for t in found.traffic}
    assert links["fsdp",] == "NVLink 4" and links["data",] == "InfiniBand NDR"
    assert {t.dtype for t in found.traffic if t.kind == "reduce-scatter"} >= {"bf16"}
    assert found.compiled and found.fits and found.options and found.roofline.network > 0
