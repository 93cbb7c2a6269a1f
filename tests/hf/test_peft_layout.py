"""Adapters merged into a saved model, written as the PEFT library does, and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dsjax.checkpoint import DiskCheckpoints
from dsjax.config import load
from dsjax.errors import ConfigError, InputError
from dsjax.hf.peft import CONFIG, WEIGHTS
from dsjax.mesh import map_named, named_leaves
from dsjax.observe.logs import EventLog
from dsjax.train.assemble import program_for
from dsjax.train.hugging_face import export_run
from dsjax.train.resume import fresh_state
from dsjax.train.rundir import RunDirectory

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
KINDS = ("llama-llama3-tied", "gpt2-plain", "mixtral-plain", "deepseek_v3-plain")
LORA = ("lora.rank=3", "lora.alpha=6")


def begun(name: str, run: Path, *words: str, devices: int = 1, kept: bool = True) -> tuple[Any, Any]:
    """(program, state) of a run from a saved model whose adapters add something; its checkpoint is saved."""
    source, kind = FIXTURES / name, name.partition("-")[0]
    config = load([], [f"run.dir={run}", f"run.init_from={source}", f"model.kind={kind}", f"model.config={source}",
                       "data.kind=synthetic", "precision.policy=fp32", "train.sequence_length=16", *LORA, *words,
                       *(["model.attn_pdrop=0"] if kind == "gpt2" else [])])  # fmt: skip
    program, _ = program_for(config, jax.devices()[:devices])
    state = fresh_state(program, config)
    if not kept:
        return program, state
    rng = np.random.default_rng(0)

    def drawn(path: str, leaf: jax.Array) -> jax.Array:
        return jnp.asarray(rng.normal(size=leaf.shape, scale=0.1), leaf.dtype)

    state = replace(state, params=map_named(drawn, state.params))
    where = RunDirectory(config.run.directory, config)
    where.begin(EventLog(run), 0, [])
    store = DiskCheckpoints(config.checkpoint.disk.directory(config.run.directory), config.checkpoint.disk)
    store.save(0, state, {"step": 0, "config": where.settings, **program.facts()})
    store.close()
    return program, state


def logits_of(program: Any, state: Any, **attributes: Any) -> np.ndarray:
    model = program.model(state)
    model.eval()
    model.set_attributes(**attributes, raise_if_not_found=False)
    return np.asarray(model(jnp.asarray(np.random.default_rng(1).integers(0, 60, (2, 12)), jnp.int32)))


@pytest.mark.parametrize("name", KINDS)
def test_a_merged_model_computes_what_the_adapted_one_did(name: str, tmp_path: Path) -> None:
    program, state = begun(name, tmp_path / "run")
    want = logits_of(program, state)
    assert export_run(str(tmp_path / "run"), str(tmp_path / "out"), None, "float32", 10**9) == 0
    before, after = (load_file(d / "model.safetensors") for d in (FIXTURES / name, tmp_path / "out"))
    assert {n: v.shape for n, v in before.items()} == {n: v.shape for n, v in after.items()}
    kind = name.partition("-")[0]
    config = load([], [f"run.dir={tmp_path / 'again'}", f"run.init_from={tmp_path / 'out'}", f"model.kind={kind}",
                       f"model.config={tmp_path / 'out'}", "data.kind=synthetic", "train.sequence_length=16",
                       "precision.policy=fp32", *(["model.attn_pdrop=0"] if kind == "gpt2" else [])])  # fmt: skip
    merged, _ = program_for(config, jax.devices()[:1])
    got = logits_of(merged, fresh_state(merged, config))
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    frozen = logits_of(program, replace(state, params=jax.tree.map(jnp.zeros_like, state.params)))
    assert np.abs(want - frozen).max() > 1e-2  # the adapters do something
    if name.startswith("deepseek"):  # which reads a matrix itself where it generates
        got = logits_of(program, state, absorbed=True)
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("stabilized", ["false", "true"])
@pytest.mark.parametrize("name", KINDS)
def test_adapters_come_back_as_they_went(name: str, stabilized: str, tmp_path: Path) -> None:
    targets = ["lora.targets=attention/*"] if name.startswith("deepseek") else []
    words = [f"lora.rank_stabilized={stabilized}", *targets]
    _, state = begun(name, tmp_path / "run", *words)
    assert export_run(str(tmp_path / "run"), str(tmp_path / "out"), None, None, 10**9, adapter=True) == 0
    _, again = begun(name, tmp_path / "again", *words, f"lora.init_from={tmp_path / 'out'}", kept=False)
    for path, value in named_leaves(state.params).items():
        np.testing.assert_array_equal(np.asarray(named_leaves(again.params)[path]), np.asarray(value))


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"pipeline": 2, "fsdp": 2}], ids=str)
def test_a_mesh_reads_the_adapters_of_one_device(mesh: dict[str, int], tmp_path: Path) -> None:
    _, state = begun("gpt2-plain", tmp_path / "run")
    export_run(str(tmp_path / "run"), str(tmp_path / "out"), None, None, 10**9, adapter=True)
    sizes = [f"mesh.{axis}={size}" for axis, size in {"fsdp": 1, **mesh}.items()]
    program, again = begun(
        "gpt2-plain", tmp_path / "again", *sizes, f"lora.init_from={tmp_path / 'out'}",
        devices=4, kept=False,
    )  # fmt: skip
    got = named_leaves(jax.device_get(program.in_order(again.params)))
    for path, value in named_leaves(state.params).items():
        np.testing.assert_array_equal(got[path], np.asarray(value))


def test_the_layout_is_pefts(tmp_path: Path) -> None:
    begun("llama-llama3-tied", tmp_path / "run", "lora.targets=[q_proj,down_proj]", "lora.dropout=0.1")
    export_run(str(tmp_path / "run"), str(tmp_path / "out"), None, None, 10**9, adapter=True)
    told = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert told["peft_type"] == "LORA" and told["task_type"] == "CAUSAL_LM" and told["bias"] == "none"
    assert (told["r"], told["lora_alpha"], told["lora_dropout"]) == (3, 6.0, 0.1)
    assert sorted(told["target_modules"]) == ["down_proj", "q_proj"] and not told["fan_in_fan_out"]
    assert told["base_model_name_or_path"] == str(FIXTURES / "llama-llama3-tied")
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    base = load_file(FIXTURES / "llama-llama3-tied" / "model.safetensors")
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        rows, columns = base[f"model.layers.1.{module}.weight"].shape
        assert tensors[f"base_model.model.model.layers.1.{module}.lora_A.weight"].shape == (3, columns)
        assert tensors[f"base_model.model.model.layers.1.{module}.lora_B.weight"].shape == (rows, 3)
    layers = sum(".self_attn.q_proj.weight" in name for name in base)
    assert len(tensors) == 2 * 2 * layers


def test_adapters_have_the_type_that_is_asked_for(tmp_path: Path) -> None:
    begun("llama-llama3-tied", tmp_path / "run")
    export_run(str(tmp_path / "run"), str(tmp_path / "out"), None, "bfloat16", 10**9, adapter=True)
    assert {str(v.dtype) for v in load_file(tmp_path / "out" / WEIGHTS).values()} == {"bfloat16"}


def test_one_adapter_for_queries_keys_and_values_is_read(tmp_path: Path) -> None:
    """As PEFT trains GPT-2's c_attn: the same A for all three."""
    begun("gpt2-plain", tmp_path / "run", "lora.targets=attention/[qkv]_proj")
    out = tmp_path / "out"
    export_run(str(tmp_path / "run"), str(out), None, None, 10**9, adapter=True)
    told, tensors = json.loads((out / CONFIG).read_text()), load_file(out / WEIGHTS)
    assert told["fan_in_fan_out"] and told["rank_pattern"] == {"c_attn": 9}
    assert told["alpha_pattern"] == {"c_attn": 18.0}
    rng = np.random.default_rng(5)
    plain = {name: rng.normal(size=(3, v.shape[1]) if "lora_A" in name else (v.shape[0], 3)).astype(np.float32)
             for name, v in tensors.items()}  # fmt: skip
    save_file(plain, out / WEIGHTS)
    (out / CONFIG).write_text(json.dumps({**told, "rank_pattern": {}, "alpha_pattern": {}}))
    _, state = begun(
        "gpt2-plain",
        tmp_path / "again",
        "lora.targets=attention/[qkv]_proj",
        f"lora.init_from={out}",
        kept=False,
    )
    got = named_leaves(state.params)
    for i, x in enumerate("qkv"):
        a = plain["base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"]
        b = plain["base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"]
        size = b.shape[0] // 3
        at = f"layers/attention/{x}_proj"
        np.testing.assert_array_equal(got[f"{at}/lora_a"][0], a.T)
        np.testing.assert_array_equal(got[f"{at}/lora_b"][0].reshape(3, size), b[i * size : (i + 1) * size].T)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    name, out = "llama-llama3-tied", tmp_path / "out"
    begun(name, tmp_path / "run")
    export_run(str(tmp_path / "run"), str(out), None, None, 10**9, adapter=True)
    told, tensors = json.loads((out / CONFIG).read_text()), load_file(out / WEIGHTS)

    def refused(*words: str) -> str:
        with pytest.raises((InputError, ConfigError)) as error:
            begun(name, tmp_path / "again", f"lora.init_from={out}", *words, kept=False)
        return "\n".join(error.value.faults)

    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert "lora.alpha" in refused("lora.alpha=5") and "lora.rank=3 lora.alpha=6" in refused("lora.alpha=5")
    assert "those of rank 3 by 2" in refused("lora.rank=2", "lora.alpha=4")
    assert "lora.rank" in refused("lora.rank=0")
    beside = refused("lora.targets=q_proj")
    assert "set lora.targets to the same layers" in beside and beside.count("\n") == 0
    narrow = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
    others = {n: v for n, v in tensors.items() if n != first} | {
        "else": np.zeros(2),
        narrow: tensors[narrow][:2],
    }
    save_file(others, out / WEIGHTS)
    found = refused()
    assert f"{first} is missing" in found and "else is no tensor of this model" in found
    assert f"{narrow} has shape [2," in found
    for extra in ({"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}):
        (out / CONFIG).write_text(json.dumps({**told, **extra}))
        assert next(iter(extra)) in refused()
    (out / CONFIG).write_text(json.dumps({**told, "peft_type": "IA3"}))
    assert "peft_type" in refused()
    (out / CONFIG).unlink()
    assert f"holds no {CONFIG}" in refused()


def test_an_adapter_alone_is_refused_where_there_is_none_or_more_was_trained(tmp_path: Path) -> None:
    name = "llama-llama3-tied"
    for run, words, said in (
        ("a", ["lora.rank=0"], "lora.rank is 0"),
        ("b", ["optimizer.trainable=norm/scale"], "norm/scale"),
    ):
        begun(name, tmp_path / run, *words)
        with pytest.raises(ConfigError, match=said):
            export_run(str(tmp_path / run), str(tmp_path / "out"), None, None, 10**9, adapter=True)


def test_adapters_that_peft_would_take_for_experts_are_refused(tmp_path: Path) -> None:
    begun("deepseek_v3-plain", tmp_path / "run")
    with pytest.raises(ConfigError, match=r"down_proj for those of experts"):
        export_run(str(tmp_path / "run"), str(tmp_path / "out"), None, None, 10**9, adapter=True)


def test_a_run_begins_from_one_without_adapters_and_not_the_other_way(tmp_path: Path) -> None:
    name = "llama-llama3-tied"
    _, base = begun(name, tmp_path / "plain", "lora.rank=0")
    program, state = begun(name, tmp_path / "tuned", f"run.init_from={tmp_path / 'plain'}", kept=False)
    frozen = named_leaves(nnx.state(program.model(state), nnx.Param))
    for path, value in named_leaves(base.params).items():
        np.testing.assert_array_equal(np.asarray(frozen[path]), np.asarray(value))
    assert not np.any(frozen["layers/attention/q_proj/lora_b"]) and np.any(
        frozen["layers/attention/q_proj/lora_a"]
    )
    _, tuned = begun(name, tmp_path / "adapted")
    _, more = begun(name, tmp_path / "more", f"run.init_from={tmp_path / 'adapted'}", kept=False)
    for path, value in named_leaves(tuned.params).items():
        np.testing.assert_array_equal(np.asarray(named_leaves(more.params)[path]), np.asarray(value))
    with pytest.raises(InputError, match="holds adapters, and this run has none"):
        begun(name, tmp_path / "none", f"run.init_from={tmp_path / 'adapted'}", "lora.rank=0", kept=False)
