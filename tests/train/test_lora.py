"""Adapters: what they add, what trains, what is refused; of a family's models and of a user's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dsjax
from dsjax.aot.hlo import Shape, parse
from dsjax.cli import main
from dsjax.config import load
from dsjax.config.lora import LoraConfig
from dsjax.errors import ConfigError
from dsjax.mesh import named_leaves
from dsjax.models.adapters import adapt
from dsjax.train.assemble import program_for

CHAT_TOKENIZER = Path(__file__).parents[1] / "data" / "fixtures" / "chat_tokenizer"
SIZES = ("model.kind=llama", "model.hidden_size=16", "model.num_hidden_layers=2", "model.num_attention_heads=2",
         "model.num_key_value_heads=2", "model.intermediate_size=64", "model.vocab_size=64")  # fmt: skip


class Net(nnx.Module):
    """A user's: a stack made with `nnx.vmap`, a product over two dimensions, heads of attention."""

    def __init__(self, *, rngs: nnx.Rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs), in_axes=(0,), out_axes=0)
        self.stack = nnx.split_rngs(splits=3)(make)(rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, deterministic=True, rngs=rngs)
        self.heads = nnx.LinearGeneral((2, 4), 8, axis=(-2, -1), rngs=rngs)
        self.table = nnx.Embed(5, 8, rngs=rngs)
        self.convolution = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        scanned = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = self.attention(scanned(x, self.stack)) + self.heads(x.reshape(*x.shape[:-1], 2, 4))
        return self.out(x)[..., 0].mean(-1)


def loss(model: Any, batch: Any) -> Any:
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2), jnp.float32(batch["y"].shape[0])


def batch_of(step: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(step).standard_normal((16, 4, 8)).astype(np.float32)
    return {"x": x, "y": x[:, 0, 0] - 2 * x[:, 1, 1]}


def trained(tmp_path: Path, mesh: dict[str, int], steps: int = 3, **more: Any) -> tuple[Any, Any, list[Any]]:
    """(trainer, state, parameters before the first step and after the last)."""
    trainer = dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, lambda rate: optax.adamw(rate, eps=1e-4), learning_rate=1e-2, mesh=mesh,
        devices=jax.devices()[: int(np.prod(list(mesh.values())))], run={"dir": str(tmp_path)}, **more,
    )  # fmt: skip
    state = trainer.init(seed=2)
    seen = [jax.device_get(named_leaves(nnx.state(trainer.model(state), nnx.Param)))]
    for step in range(steps):
        state, _ = trainer.step(state, batch_of(step))
    seen.append(jax.device_get(named_leaves(nnx.state(trainer.model(state), nnx.Param))))
    return trainer, state, seen


def test_a_users_model_trains_its_adapters_and_nothing_else(tmp_path: Path) -> None:
    lora = {"rank": 2, "alpha": 8.0}
    _, _, (plain, _) = trained(tmp_path / "plain", {"fsdp": 1}, 0)
    trainer, state, (before, after) = trained(tmp_path / "one", {"fsdp": 1}, lora=lora)
    assert {p: v.shape for p, v in before.items()} == {
        **{p: v.shape for p, v in plain.items()},
        **{f"{at}/lora_{x}": shape for at, (a, b) in {
            "stack": ((3, 8, 2), (3, 2, 8)), "heads": ((2, 4, 2), (2, 8)), "out": ((8, 2), (2, 1)),
            **{f"attention/{x}": ((8, 2), (2, 2, 4)) for x in ("query", "key", "value")},
            "attention/out": ((2, 4, 2), (2, 8)),
        }.items() for x, shape in (("a", a), ("b", b))},
    }  # fmt: skip
    for path, value in plain.items():
        np.testing.assert_array_equal(before[path], value)  # drawn as without adapters
        np.testing.assert_array_equal(after[path], value)
    for path in before.keys() - plain.keys():
        assert (path.endswith("lora_b")) == (not before[path].any())
        assert not np.array_equal(before[path], after[path])
    owners = {name.rpartition("/")[2] for name, leaf in named_leaves(state.opt_state).items() if leaf.ndim}
    assert owners == {"lora_a", "lora_b"}
    assert any(note.startswith("trains ") and "rank 2" in note for note in trainer.notes)


def test_fresh_adapters_add_nothing_and_trained_ones_what_their_product_does(tmp_path: Path) -> None:
    x = batch_of(9)["x"]
    _, _, _ = trained(tmp_path, {"fsdp": 1}, 0)
    plain = Net(rngs=nnx.Rngs(0))
    model = Net(rngs=nnx.Rngs(0))
    adapt(model, LoraConfig(rank=3, alpha=6.0), jax.random.key(1))
    np.testing.assert_array_equal(np.asarray(model(x)), np.asarray(plain(x)))
    rng = np.random.default_rng(0)
    for path, leaf in named_leaves(nnx.state(model, nnx.Param)).items():
        if path.endswith("lora_b"):
            layer = model
            for name in path.split("/")[:-1]:
                layer = getattr(layer, name)
            layer.lora_b[...] = jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)
    for path in (
        "stack",
        "heads",
        "out",
        "attention/query",
        "attention/key",
        "attention/value",
        "attention/out",
    ):
        ours, theirs = model, plain
        for name in path.split("/"):
            ours, theirs = getattr(ours, name), getattr(theirs, name)
        a, b, shape = np.asarray(ours.lora_a[...]), np.asarray(ours.lora_b[...]), theirs.kernel.shape
        lead = shape[:1] if path == "stack" else ()
        added = 2.0 * (a.reshape(*lead, -1, 3) @ b.reshape(*lead, 3, -1)).reshape(shape)
        theirs.kernel[...] = theirs.kernel[...] + added
    want = np.asarray(plain(x))
    np.testing.assert_allclose(np.asarray(model(x)), want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2}, {"fsdp": 4}], ids=str)
def test_a_users_model_on_a_mesh_equals_one_device(mesh: dict[str, int], tmp_path: Path) -> None:
    lora = {"rank": 2, "alpha": 8.0}
    _, _, (_, want) = trained(tmp_path / "one", {"fsdp": 1}, lora=lora)
    _, _, (_, got) = trained(tmp_path / "mesh", mesh, lora=lora)
    for path, value in want.items():
        np.testing.assert_allclose(got[path], value, atol=2e-5)


def test_what_else_is_asked_to_train_does(tmp_path: Path) -> None:
    more = {"trainable": ["out/bias"], "lora": {"rank": 2, "targets": ["query", "stack"]}}
    _, _, (before, after) = trained(tmp_path, {"fsdp": 1}, **more)
    moved = {path for path in before if not np.array_equal(before[path], after[path])}
    assert moved == {"out/bias", *(f"{at}/lora_{x}" for at in ("stack", "attention/query") for x in "ab")}
    with pytest.raises(ConfigError, match="no parameter matches nothing"):
        trained(tmp_path, {"fsdp": 1}, trainable=["nothing"], lora={"rank": 2})


@pytest.mark.parametrize(
    ("targets", "said"),
    [("table", "looked up in"), ("convolution", "Conv is no nnx.Linear"), ("hedas", "did you mean heads"),
     ("nowhere/*", "no layer is meant")],
)  # fmt: skip
def test_targets_that_can_have_none_are_refused(targets: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        adapt(Net(rngs=nnx.Rngs(0)), LoraConfig(rank=2, targets=[targets]), jax.random.key(1))


def program(*words: str, devices: int = 1) -> Any:
    words = (*SIZES, "data.kind=synthetic", "train.global_batch_size=8", "train.sequence_length=16",
             "lora.rank=2", *words)  # fmt: skip
    return program_for(load([], list(words), {}), jax.devices()[:devices])[0]


@pytest.mark.parametrize("targets", ["head", "experts/up_proj", "router"])
def test_matrices_that_others_multiply_by_are_refused(targets: str) -> None:
    words = ("model.kind=mixtral", "model.num_local_experts=2", f"lora.targets={targets}")
    with pytest.raises(ConfigError, match="can have no adapter"):
        program(*words)


def test_frozen_matrices_are_kept_in_bf16_and_adapters_in_fp32() -> None:
    state = program("precision.params=bfloat16").abstract_state
    frozen = named_leaves(state.model_state.filter(nnx.Param))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    assert frozen["layers/mlp/up_proj/kernel"].dtype == jnp.bfloat16
    assert frozen["norm/scale"].dtype == jnp.float32


def sizes(shape: Any) -> list[int]:
    """Numbers in each array of what an instruction gives."""
    return [math.prod(shape.dims)] if isinstance(shape, Shape) else [n for one in shape for n in sizes(one)]


def reduced(*words: str) -> list[int]:
    """Numbers in each array that a step reduces over devices, of a model whose adapters are small beside a matrix."""
    one = program("mesh.data=2", "mesh.fsdp=2", "train.remat=full", "model.hidden_size=64",
                  "model.intermediate_size=512", *words, devices=4)  # fmt: skip
    rows = np.zeros((8, 16), np.int32)
    batch = {"tokens": rows, "targets": rows, "positions": rows, "segment_ids": rows + 1,
             "weights": rows.astype(np.float32)}  # fmt: skip
    module = parse(one.lower_step(one.place(batch)).compile().as_text())
    wanted = ("all-reduce", "reduce-scatter", "all-to-all")
    return [n for computation in module.computations.values() for op in computation.instructions
            if op.opcode.startswith(wanted) for n in sizes(op.shape)]  # fmt: skip


def test_no_gradient_of_a_matrix_is_exchanged() -> None:
    adapters = sum(leaf.size for leaf in jax.tree.leaves(program(
        "model.hidden_size=64", "model.intermediate_size=512").abstract_state.params))  # fmt: skip
    assert max(reduced()) <= adapters < 64 * 512 // 2  # half of a matrix of one layer
    assert max(reduced("lora.rank=0")) >= 64 * 512 // 2


def test_a_chat_is_learned_from_the_command_line(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    talks = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * 3}]
        for i in range(40)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    sizes = [word for word in SIZES if "vocab" not in word]
    common = [*sizes, f"data.tokenizer={CHAT_TOKENIZER}", "train.global_batch_size=8", "train.sequence_length=32",
              "data.cache_dir=cache", "observe.progress=plain"]  # fmt: skip

    def run(*argv: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        return ended.value.code, capfd.readouterr().out

    (tmp_path / "c.yaml").write_text("data: {kind: chat, paths: chat.jsonl, holdout: 0.2}\n")
    assert run("train", "c.yaml", *common, "train.steps=1", "run.name=base")[0] == 0
    tuned = [*common, "run.name=tuned", "run.init_from=runs/base", "lora.rank=2", "optimizer.learning_rate=2e-2",
             "optimizer.schedule.warmup_steps=0", "observe.log_every=1"]  # fmt: skip
    code, out = run("train", "c.yaml", *tuned, "train.steps=12", "train.stop_after=6")
    assert code == 75 and "parameters (adapters of rank 2)" in out
    assert run("train", "c.yaml", *tuned, "train.steps=12")[0] == 0
    lines = map(json.loads, Path("runs/tuned/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert run("generate", "c.yaml", *tuned, "train.steps=12", "--prompt", "1?", "--max-tokens", "3")[0] == 0
    assert run("eval", "c.yaml", *tuned, "train.steps=12")[0] == 0
