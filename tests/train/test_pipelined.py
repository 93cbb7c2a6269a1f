"""A model of one's own over a pipeline: it trains as on one device, is evaluated, stored, moved and sampled from."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from test_commands import dsjax as run_dsjax
from test_commands import losses
from test_docs import blocks

import dsjax
from dsjax.errors import ConfigError, InputError
from dsjax.mesh import named_leaves

VOCAB, WIDTH, LAYERS, ROWS, LENGTH, STEPS = 19, 16, 5, 32, 6, 5
TOLERANCE = 1e-5


class Block(nnx.Module):
    """Norm, two matrices, dropout; `h` is what it adds to the loss for."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 24, rngs=rngs)
        self.down = nnx.Linear(24, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(self.up(self.norm(x)))
        return x + self.drop(self.down(h)), h


class Net(nnx.Module):
    """A language model without attention, its embedding tied to its head."""

    def __init__(self, *, rngs: nnx.Rngs, layers: int = LAYERS):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = dsjax.stacked(lambda rngs: Block(rngs=rngs), layers, rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def logits(self, x: jax.Array) -> jax.Array:
        return self.norm(x) @ self.embed.embedding[...].T


def prepare(batch: Any) -> Any:
    return {**batch, "mask": batch["weight"][..., None]}


def embed(model: Net, batch: Any) -> jax.Array:
    return model.embed(batch["tokens"])


def layer(block: Block, x: jax.Array, batch: Any) -> Any:
    y, h = block(x)
    h = h * batch["mask"]
    return y, 1e-2 * jnp.sum(h**2), {"activity": (jnp.sum(jnp.abs(h)), jnp.sum(batch["mask"]))}


def head(model: Net, x: jax.Array, batch: Any) -> Any:
    logits = model.logits(x)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    weight, right = batch["weight"], jnp.argmax(logits, -1) == batch["targets"]
    return jnp.sum(each * weight), jnp.sum(weight), {"accuracy": (jnp.sum(right * weight), jnp.sum(weight))}


def layer_of_two(block: Block, x: Any, batch: Any) -> Any:
    y, *more = layer(block, x["now"] + 0.1 * x["all"], batch)
    return {"now": y, "all": x["all"] + y}, *more


NET = dsjax.Stages(embed=embed, layer=layer, head=head, prepare=prepare)
STAGES = {
    "one array": NET,
    "two arrays": replace(
        NET,
        embed=lambda model, batch: {"now": (x := embed(model, batch)), "all": jnp.zeros_like(x)},
        layer=layer_of_two,
        head=lambda model, x, batch: head(model, x["now"] + x["all"], batch),
    ),
}
# Inside the layers and outside of them, some of each.
SOME = ("layers/down/*", "layers/norm/scale", "embed/*")

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {"mesh": {"fsdp": 1}},
    "1f1b": {"mesh": {"pipeline": 2, "data": 2, "fsdp": 2}, "pipeline": {"microbatches": 4}},
    "gpipe": {
        "mesh": {"pipeline": 2}, "pipeline": {"schedule": "gpipe", "microbatches": 4}, "gradient_accumulation_steps": 2,
    },
    "interleaved": {"mesh": {"pipeline": 2, "fsdp": 2}, "pipeline": {"schedule": "interleaved", "microbatches": 4}},
    "zero_bubble": {
        "mesh": {"pipeline": 4, "data": 2}, "pipeline": {"schedule": "zero_bubble", "microbatches": 4},
        "gradient_accumulation_steps": 2,
    },
    "kept": {"mesh": {"pipeline": 4, "fsdp": 2}, "pipeline": {"recompute": False}, "fsdp_gather": "step"},
    "by hand": {
        "mesh": {"pipeline": 2, "data": 2}, "remat": "dots",
        "pipeline": {"layers": [1, 4], "recompute": False, "microbatches": 4},
    },
    "context": {"mesh": {"pipeline": 2, "context": 2}, "pipeline": {"microbatches": 2}},
}  # fmt: skip


def batch_of(step: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCAB, (rows, LENGTH + 1)).astype(np.int32)
    weight = (rng.random((rows, LENGTH)) < 0.8).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": weight}


def trainer_of(layout: Mapping[str, Any], place: Path, **more: Any) -> dsjax.Trainer:
    settings = {
        "stages": NET,
        "run": {"dir": str(place)},
        "checkpoint": {"disk": {"keep": 9}},
        **layout,
        **more,
    }
    return dsjax.Trainer(
        settings.pop("init", lambda rngs: Net(rngs=rngs)),
        settings.pop("loss", None),
        # Against gradients of about 0.1: a small eps makes steps of rounding noise.
        lambda rate: optax.adamw(rate, eps=1e-2),
        learning_rate=3e-2,
        devices=jax.devices()[: int(np.prod(list(layout["mesh"].values())))],
        compiler_options={"xla_backend_optimization_level": 0},
        **settings,
    )


@dataclass
class Trained:
    trainer: dsjax.Trainer
    state: Any
    metrics: list[dict[str, float]]

    @property
    def params(self) -> dict[str, np.ndarray]:
        """Of the model that the trainer hands out, by name."""
        leaves = named_leaves(nnx.state(self.trainer.model(self.state), nnx.Param))
        return {name: np.asarray(leaf) for name, leaf in leaves.items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelined")


@pytest.fixture(scope="module")
def trained(place: Path) -> Any:
    """Five steps of a model in a layout, once for all tests."""

    @cache
    def train(name: str, model: str = "one array", trainable: tuple[str, ...] = ()) -> Trained:
        trainer = trainer_of(LAYOUTS[name], place, stages=STAGES[model], trainable=trainable)
        state, metrics = trainer.init(seed=1), []
        for step in range(STEPS):
            state, record = trainer.step(state, batch_of(step))
            metrics.append({name: float(value) for name, value in record.items()})
        return Trained(trainer, state, metrics)

    return train


def check(got: Trained, want: Trained) -> None:
    for step, (a, b) in enumerate(zip(got.metrics, want.metrics, strict=True)):
        assert a == pytest.approx(b, rel=TOLERANCE), f"step {step + 1}"
        assert {"loss", "grad_norm", "extra/activity", "extra/accuracy"} <= set(a)
    assert got.params.keys() == want.params.keys()
    for name, value in want.params.items():
        worst = np.max(np.abs(got.params[name] - value)) / max(np.max(np.abs(value)), 1e-3)
        assert worst < TOLERANCE, f"{name}: off by {worst:.1e}"


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one device"])
def test_a_model_of_ones_own_trains_as_on_one_device(trained: Any, layout: str) -> None:
    check(trained(layout), trained("one device"))


def test_what_passes_between_layers_may_be_a_tree(trained: Any) -> None:
    check(trained("zero_bubble", "two arrays"), trained("one device", "two arrays"))


@pytest.mark.parametrize(("layout", "model"), [("kept", "one array"), ("interleaved", "two arrays")])
def test_parameters_that_are_frozen_stay_as_they_are(trained: Any, layout: str, model: str) -> None:
    got = trained(layout, model, SOME)
    check(got, trained("one device", model, SOME))
    first = named_leaves(nnx.state(got.trainer.model(got.trainer.init(seed=1)), nnx.Param))
    for name, value in got.params.items():
        moved = bool(np.any(value != np.asarray(first[name])))
        assert moved == any(name.startswith(pattern.rstrip("*")) for pattern in SOME), name


def test_parameters_lie_over_the_stages_and_the_shards(trained: Any) -> None:
    params = trained("1f1b").state.params
    parts = {name: leaf.addressable_shards[0].data.shape for name, leaf in named_leaves(params).items()}
    # Five layers on two stages are six slots; 19 rows of the embedding do not divide, its 16 columns do.
    assert parts["layers/up/kernel"] == (3, WIDTH, 12) and parts["layers/norm/scale"] == (3, WIDTH // 2)
    assert parts["embed/embedding"] == (VOCAB, WIDTH // 4) and parts["norm/bias"] == (WIDTH // 4,)
    whole = {name: leaf.shape for name, leaf in named_leaves(trained("kept").state.params).items()}
    assert whole["layers/up/kernel"] == (8, WIDTH, 24)


@pytest.mark.parametrize("layout", ["1f1b", "zero_bubble"])
def test_evaluation_is_that_of_one_device_for_any_number_of_rows(trained: Any, layout: str) -> None:
    # 12 rows divide over the shards but not into microbatches of all of them, 13 over nothing.
    batches = [batch_of(8, 12), batch_of(9, 13)]
    alone, got = trained("one device"), trained(layout)
    want = alone.trainer.evaluate(alone.state, batches)
    assert want["tokens"] == sum(b["weight"].sum() for b in batches)
    assert got.trainer.evaluate(got.state, batches) == pytest.approx(want, rel=TOLERANCE)


# ---- checkpoints ---------------------------------------------------------------------------------

CHAIN = ("zero_bubble", "by hand", "one device", "interleaved")


def exact(trainer: dsjax.Trainer, state: Any) -> dict[str, np.ndarray]:
    """Parameters and moments in the model's order."""
    tree = trainer.program.in_order({"params": state.params, "opt_state": state.opt_state})
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


@pytest.fixture(scope="module")
def moved(trained: Any) -> Iterator[list[float]]:
    """Losses of a run whose every step is done by another partition, from the checkpoint of the one before."""
    found, before = [], None
    for step, name in enumerate(CHAIN):
        trainer = trained(name).trainer
        state = trainer.restore() if step else trainer.init(seed=1)
        if before is not None:
            for leaf, value in exact(trainer, state).items():
                np.testing.assert_array_equal(value, before[leaf], err_msg=f"{leaf}, restored by {name}")
        state, metrics = trainer.step(state, batch_of(step))
        found.append(float(metrics["loss"]))
        before = exact(trainer, state)
        assert trainer.save(state) == step + 1
    return found


def test_a_run_goes_on_in_any_other_partition(trained: Any, moved: list[float]) -> None:
    undisturbed = [record["loss"] for record in trained("one device").metrics]
    np.testing.assert_allclose(moved, undisturbed[: len(CHAIN)], rtol=1e-6)


def test_a_resumed_pipeline_is_the_undisturbed_one_to_the_last_bit(trained: Any, moved: Any) -> None:
    trainer = trained("interleaved").trainer
    state = trainer.restore(3)
    on = []
    for step in (3, 4):
        state, metrics = trainer.step(state, batch_of(step))
        on.append(float(metrics["loss"]))
    assert on[0] == moved[3]
    _, metrics = trainer.step(trainer.restore(4), batch_of(4))
    assert float(metrics["loss"]) == on[1]


def test_a_checkpoint_tells_plain_orbax_which_layer_lies_where(trained: Any, moved: Any, place: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.restore(place / "checkpoints" / "1" / "state")
    trainer = trained("zero_bubble").trainer
    state, facts = trainer.restore_with_facts(1)
    assert facts["layers"] == {"path": "layers", "slots": [0, -1, 1, 2, 3, -1, 4, -1]}
    found = {name.split("/value")[0]: leaf for name, leaf in named_leaves(stored["params"]).items()}
    kernel = trainer.model(state).layers.up.kernel[...]
    for slot, layer in enumerate(facts["layers"]["slots"]):
        want = kernel[layer] if layer >= 0 else np.zeros((WIDTH, 24))
        np.testing.assert_array_equal(found["layers/up/kernel"][slot], want)
    # Without a pipeline layers lie in order, and nothing is said.
    assert trainer.restore_with_facts(3)[1]["layers"] is None


@pytest.mark.parametrize("layout", ["one device", "interleaved"])
def test_a_run_may_begin_with_the_parameters_of_another_partition(
    trained: Any, moved: Any, place: Path, tmp_path: Path, layout: str
) -> None:
    source = tmp_path / "source"
    (source / "checkpoints").mkdir(parents=True)
    (source / "checkpoints" / "1").symlink_to(place / "checkpoints" / "1")
    trainer = trainer_of(
        LAYOUTS[layout], tmp_path / "run", run={"dir": str(tmp_path / "run"), "init_from": str(source)}
    )
    seen: list[float] = []
    trainer.fit(iter([batch_of(1)]), steps=1, on_step=lambda step, record: seen.append(record["loss"]))
    alone = trained("one device").trainer
    state = alone.init(seed=trainer.config.run.seed).replace(params=alone.restore(1).params)
    _, metrics = alone.step(state, batch_of(1))
    assert seen == [pytest.approx(float(metrics["loss"]), rel=1e-6)]


# ---- what is refused -----------------------------------------------------------------------------


class Normed(nnx.Module):
    """A layer whose norm keeps running statistics."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm, self.up = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)


class Unlike(nnx.Module):
    """Two stacks of different depth under one name."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.one = dsjax.stacked(lambda rngs: Block(rngs=rngs), 4, rngs)
        self.other = dsjax.stacked(lambda rngs: Block(rngs=rngs), 3, rngs)


def net_of(layers: Any) -> Any:
    def init(rngs: nnx.Rngs) -> Net:
        net = Net(rngs=rngs)
        net.layers = layers(rngs)
        return net

    return init


def two(schedule: str, microbatches: int | None = 4, **more: Any) -> dict[str, Any]:
    return {"mesh": {"pipeline": 2}, "pipeline": {"schedule": schedule, "microbatches": microbatches, **more}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no stages": (
        {**two("1f1b"), "stages": None, "loss": lambda model, batch: (0.0, 1.0)},
        "mesh.pipeline: 2 stages need a model that says where it can be cut: give `stages`",
    ),
    "stages and a loss": ({**two("1f1b"), "loss": lambda model, batch: (0.0, 1.0)}, "loss: .*give one of the two"),
    "something else than stages": ({**two("1f1b"), "stages": embed}, "stages: takes a dsjax.Stages"),
    "neither": ({"mesh": {"fsdp": 1}, "stages": None}, "loss: takes a function"),
    "fewer layers than stages": (
        {"mesh": {"pipeline": 8}}, "mesh.pipeline: 8 stages x 1 chunks need 8 layers, the model has 5; .*at most 5$",
    ),
    "fewer layers than chunks": (
        two("interleaved", virtual_stages=3), "need 6 layers, the model has 5; use pipeline.virtual_stages=2$",
    ),
    "layers for too few stages": (
        {"mesh": {"pipeline": 4}, "pipeline": {"layers": [2, 3]}},
        r"pipeline.layers: \[2, 3\] names 2 stages, there are 4 .*; \[1, 2, 1, 1\] works$",
    ),
    "layers that do not add up": (
        two("1f1b", layers=[2, 4]), r"pipeline.layers: \[2, 4\] adds up to 6 layers, the model has 5; \[3, 2\] works$",
    ),
    "too few microbatches to interleave": (
        {"mesh": {"pipeline": 4}, "pipeline": {"schedule": "interleaved", "microbatches": 2}},
        "interleaved needs at least as many microbatches as stages.*set pipeline.microbatches=4",
    ),
    "chunks without interleaving": (two("1f1b", virtual_stages=2), "set pipeline.virtual_stages=1 or .*=interleaved"),
    "interleaving without chunks": (two("interleaved", virtual_stages=1), "set pipeline.virtual_stages=2"),
    "zero_bubble and remat": ({**two("zero_bubble"), "remat": "full"}, "train.remat: full .*set train.remat=none"),
    "zero_bubble and recompute": (two("zero_bubble", recompute=True), "set pipeline.recompute=false or"),
    "groups of layers": ({**two("1f1b"), "remat": "every_2"}, "train.remat: every_2 .*train.remat none, full or dots"),
    "running statistics": (
        {**two("1f1b"), "init": net_of(lambda rngs: dsjax.stacked(lambda r: Normed(rngs=r), 4, rngs))},
        "mesh.pipeline: the model has BatchNorm statistics",
    ),
    "stacks of two depths": (
        {**two("1f1b"), "init": net_of(lambda rngs: Unlike(rngs=rngs))}, "differ in their leading dimension",
    ),
    "no such layers": (
        {**two("1f1b"), "stages": replace(NET, layers="blocks")}, "stages.layers: Net has no blocks; name",
    ),
    "a schedule of no name": (two("zigzag"), "pipeline.schedule"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_go_together_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    settings, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as refused:
        trainer_of(settings, tmp_path)
    assert len(refused.value.faults) == 1 and "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"layer": lambda block, x, batch: x[..., :3]},
            r"stages: embed gives float32\[8, 6, 16\] but a layer makes .*3\]",
        ),
        ({"layer": lambda block, x, batch: (x, x)}, "stages.layer: returns x, .*go into a dictionary"),
        ({"head": lambda model, x, batch: x.sum()}, r"a loss returns \(sum of losses, weight\)"),
        ({"head": lambda model, x, batch: (x.sum(), 1.0, {"loss": (x.sum(), 1.0)})}, "these names are taken"),
    ],
    ids=["shapes", "layer", "head", "names"],
)
def test_parts_that_do_not_fit_are_refused_before_the_step_is_compiled(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer = trainer_of(two("1f1b"), tmp_path, stages=replace(NET, **changed))
    state = trainer.init()
    with pytest.raises(ConfigError, match=message) as refused:
        trainer.step(state, batch_of(0))
    assert len(refused.value.faults) == 1
    assert "step" not in [what for what, _ in trainer.compiles]


def test_rows_that_do_not_divide_are_refused_with_what_does(tmp_path: Path) -> None:
    trainer = trainer_of({"mesh": {"pipeline": 2, "data": 2}, "pipeline": {"microbatches": 3}}, tmp_path)
    with pytest.raises(
        InputError, match=r"32 rows .*3 microbatches of the pipeline.*2 shards.*multiple of 6$"
    ):
        trainer.step(trainer.init(), batch_of(0))
    assert "step" not in [what for what, _ in trainer.compiles]


# ---- the command line, and the guide -------------------------------------------------------------


def test_the_model_of_the_guide_trains_and_speaks_over_stages_as_without(tmp_path: Path) -> None:
    for language in ("python", "yaml"):
        for block in blocks("docs/pipelines.md", language):
            if named := re.match(r"# (staged\.\w+)\n", block):
                (tmp_path / named[1]).write_text(block)
    short = ("train.steps=4", "observe.log_every=1", "observe.progress=none")
    for run, *mesh in (("staged",), ("alone", "mesh.pipeline=1", "mesh.fsdp=1", "runtime.cpu_devices=1")):
        ended = run_dsjax(tmp_path, "train", "staged.yaml", f"run.name={run}", *mesh, *short)
        assert ended.returncode == 0, ended.stderr
    found, want = losses(tmp_path, "staged"), losses(tmp_path, "alone")
    assert len(found) == 4 and found[-1] < found[0]
    np.testing.assert_allclose(found, want, rtol=TOLERANCE)
    said = [
        run_dsjax(
            tmp_path,
            "generate",
            "staged.yaml",
            *mesh,
            "--prompt",
            "import",
            "--max-tokens",
            "8",
            "--seed",
            "3",
        )
        for mesh in ((), ("mesh.pipeline=1", "mesh.fsdp=1", "runtime.cpu_devices=1"))
    ]
    assert said[0].returncode == 0, said[0].stderr
    assert said[0].stdout == said[1].stdout and said[0].stdout.startswith("import")


def test_the_trainer_of_the_guide_is_made_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, script = (b for b in blocks("docs/pipelines.md", "python"))
    (tmp_path / "staged.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(script, names)
    assert names["trainer"].program.stacking.partition.counts == (3, 3)
    assert names["trainer"].program.stacking.pipelining.work.schedule.microbatches == 4
    monkeypatch.delitem(sys.modules, "staged")
