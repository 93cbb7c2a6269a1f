"""Saved models onto meshes and back, and what is said of those that cannot be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from dsjax.config import load
from dsjax.data.tokenizer import HuggingFaceTokenizer
from dsjax.errors import ConfigError, InputError
from dsjax.hf.hub import is_saved_model, local
from dsjax.hf.tensors import INDEX, Tensors
from dsjax.mesh import named_leaves
from dsjax.train.assemble import program_for
from dsjax.train.hugging_face import check_model, export_run, import_model
from dsjax.train.resume import fresh_state
from dsjax.train.run import train

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
CHAT = Path(__file__).parents[1] / "data" / "fixtures" / "chat_tokenizer"
TURN = [{"role": "user", "content": "hi"}]
# One of each kind of weights: plain, biases and a window by layer, tied and scaled, fused, experts, latents.
KINDS = (
    "llama-llama3-tied", "qwen2-windows-tied", "gemma2-capped", "gpt2-plain", "mixtral-plain", "deepseek_v3-plain",
)  # fmt: skip


def copied(name: str, to: Path) -> Path:
    shutil.copytree(FIXTURES / name, to)
    (to / "expected.npz").unlink()
    return to


@pytest.mark.parametrize("name", KINDS)
def test_a_model_comes_out_as_it_went_in(name: str, tmp_path: Path) -> None:
    assert import_model(str(FIXTURES / name), str(tmp_path / "run"), []) == 0
    assert export_run(str(tmp_path / "run"), str(tmp_path / "out"), None, None, 10**9) == 0
    before, after = (load_file(d / "model.safetensors") for d in (FIXTURES / name, tmp_path / "out"))
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype
        np.testing.assert_array_equal(value, after[tensor], strict=True)
    was, is_ = (json.loads((d / "config.json").read_text()) for d in (FIXTURES / name, tmp_path / "out"))
    assert was == is_


def test_files_of_a_size_with_an_index_in_the_type_that_came(tmp_path: Path) -> None:
    source = copied("llama-plain", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    half = sorted(narrow)[: len(narrow) // 2]
    (source / "model.safetensors").unlink()
    rest = narrow.keys() - set(half)
    parts = {f"{i}.safetensors": {n: narrow[n] for n in names} for i, names in enumerate((half, rest))}
    for file, part in parts.items():
        save_file(part, source / file)
    where = {name: file for file, part in parts.items() for name in part}
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    (source / "tokenizer_config.json").write_text('{"chat_template": "x"}')

    import_model(str(source), str(tmp_path / "run"), [])
    export_run(str(tmp_path / "run"), str(tmp_path / "out"), None, None, 4000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files == sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    out = {n: v for file in files for n, v in load_file(tmp_path / "out" / file).items()}
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in out.values())
    for name, value in narrow.items():
        np.testing.assert_array_equal(out[name].view(np.uint16), value.view(np.uint16), strict=True)
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"chat_template": "x"}'


MESHES = ({"fsdp": 8}, {"fsdp": 2, "tensor": 2, "context": 2}, {"pipeline": 2, "data": 2, "tensor": 2})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_mesh_gets_the_weights_each_byte_read_once_a_shard(
    mesh: dict[str, int], tmp_path: Path, monkeypatch: Any
) -> None:
    read: list[Tensors] = []
    monkeypatch.setattr(Tensors, "__init__", _noting(Tensors.__init__, read))
    source = FIXTURES / "gemma3_text-pattern"
    sizes = [f"mesh.{axis}={size}" for axis, size in {"fsdp": 1, **mesh}.items()]
    config = load([], [*sizes, "model.kind=gemma3_text", f"model.config={source}", f"run.init_from={source}",
                       f"run.dir={tmp_path}", "train.global_batch_size=8", "train.sequence_length=16",
                       "train.gradient_accumulation_steps=1", "data.kind=synthetic"])  # fmt: skip
    program, model = program_for(config, jax.devices()[:8])
    state = fresh_state(program, config)
    want = model.family.weights().from_theirs(load_file(source / "model.safetensors"))
    got = named_leaves(jax.device_get(program.in_order(state.params)))
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(np.asarray(got[path]), value, strict=True)
    # Devices that hold the same share one reading; where a cut goes through a head's columns both sides read it.
    stored = sum(v.nbytes for v in load_file(source / "model.safetensors").values())
    assert stored <= read[0].read <= 1.05 * stored
    assert (tmp_path / "hf" / "config.json").is_file()


def _noting(init: Any, made: list[Any]) -> Any:
    def noting(self: Any, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    return noting


def test_a_box_reads_its_own_bytes_and_blocks_of_8_bits_get_their_scales(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(10, 6)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, size=(3, 2)).astype(np.float32)
    save_file({"w": codes, "w_scale_inv": scales, "v": np.arange(4.0)}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = Tensors(tmp_path)
    assert tensors.shapes == {"w": (10, 6), "v": (4,)}
    assert tensors.get("v", ((1, 3),)).tolist() == [1.0, 2.0] and tensors.read == 16
    whole = codes.astype(np.float32) * np.repeat(np.repeat(scales, 4, 0), 4, 1)[:10, :6]
    np.testing.assert_array_equal(tensors.get("w", ((3, 9), (2, 6))), whole[3:9, 2:6])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="weight_block_size"):
        Tensors(tmp_path)


def test_weights_in_blocks_of_8_bits_come_in_as_what_they_stand_for(tmp_path: Path) -> None:
    source, rng = copied("deepseek_v3-plain", tmp_path / "source"), np.random.default_rng(0)
    tensors, stored, meant = load_file(source / "model.safetensors"), {}, {}
    for name, value in tensors.items():
        stored[name] = meant[name] = value
        if value.ndim == 2 and "proj" in name:
            rows, columns = (-(-n // 4) for n in value.shape)
            scales = rng.uniform(0.01, 0.1, (rows, columns)).astype(np.float32)
            wide = np.repeat(np.repeat(scales, 4, 0), 4, 1)[: value.shape[0], : value.shape[1]]
            stored[name] = (value / wide).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"], meant[name] = scales, stored[name].astype(np.float32) * wide
    save_file(stored, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4]}
    (source / "config.json").write_text(json.dumps(config))
    import_model(str(source), str(tmp_path / "run"), [])
    export_run(str(tmp_path / "run"), str(tmp_path / "out"), None, None, 10**9)
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == tensors.keys()
    for name, value in meant.items():
        np.testing.assert_array_equal(out[name], value)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def started_from(source: Path, place: Path, *words: str) -> tuple[Any, Any]:
    """A program of a run that begins with another run's parameters, and its first state."""
    model = FIXTURES / "deepseek_v3-plain"
    config = load([], ["mesh.fsdp=1", "mesh.data=1", "model.kind=deepseek_v3", f"model.config={model}", *words,
                       f"run.init_from={source}", f"run.dir={place}", "train.sequence_length=16",
                       "data.kind=synthetic"])  # fmt: skip
    program, _ = program_for(config, jax.devices()[:1])
    return program, fresh_state(program, config)


def test_a_run_begun_from_another_has_all_that_it_learned(tmp_path: Path) -> None:
    source = copied("deepseek_v3-plain", tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    import_model(str(source), str(tmp_path / "base"), [])
    want = load_file(source / "model.safetensors")
    bias = np.stack([want[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] for i in (1, 2)])
    # Whether they are trained or not; without a change a layer's own settings stay its own.
    for name, words in (("all", []), ("some", ['optimizer.trainable=["layers/*"]'])):
        _, state = started_from(tmp_path / "base", tmp_path / name, *words)
        leaves = named_leaves(jax.device_get(state.params)) | named_leaves(jax.device_get(state.model_state))
        np.testing.assert_array_equal(leaves["layers/mlp/router/bias"], bias)
        np.testing.assert_array_equal(leaves["embed/embedding"][:97], want["model.embed_tokens.weight"])
        np.testing.assert_array_equal(leaves["layers/mlp/number"], [0, 1])
        # What stood beside the weights goes along.
        assert json.loads((tmp_path / name / "hf" / "generation_config.json").read_text()) == {
            "eos_token_id": 7
        }


def test_a_run_begins_with_parameters_of_another_type(tmp_path: Path) -> None:
    import_model(str(FIXTURES / "deepseek_v3-plain"), str(tmp_path / "base"), [])
    _, want = started_from(tmp_path / "base", tmp_path / "fp32", "lora.rank=2")
    _, state = started_from(tmp_path / "base", tmp_path / "bf16", "lora.rank=2", "precision.params=bfloat16")
    at = "layers/attention/kv_proj/kernel"
    exact, got = (np.asarray(named_leaves(one.model_state)[at]) for one in (want, state))
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, exact.astype(ml_dtypes.bfloat16))
    with pytest.raises(InputError) as error:
        started_from(tmp_path / "base", tmp_path / "other", "model.moe_intermediate_size=12")
    assert error.value.faults[0].startswith("run.init_from: checkpoint")
    assert "run.dir" not in error.value.faults[0]


def test_a_run_stands_for_the_config_and_the_tokenizer_that_it_keeps(tmp_path: Path) -> None:
    source = copied("llama-plain", tmp_path / "source")
    shutil.copyfile(CHAT / "tokenizer.json", source / "tokenizer.json")
    import_model(str(source), str(tmp_path / "base"), [])
    assert local(tmp_path / "base", "model.config", "config") == tmp_path / "base" / "hf"
    assert local(tmp_path / "base", "data.tokenizer", "tokenizer") == tmp_path / "base" / "hf"
    assert local(tmp_path / "source", "model.config", "config") == tmp_path / "source"


def test_a_model_trained_from_nothing_says_with_what_texts_begin_and_end(tmp_path: Path, capfd: Any) -> None:
    own = tmp_path / "own"
    shutil.copytree(CHAT, own)
    plain = {**json.loads((own / "tokenizer.json").read_text()), "post_processor": None}
    (own / "tokenizer.json").write_text(json.dumps(plain))
    words = ["model.kind=llama", "model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2",
             "model.intermediate_size=16", "model.max_position_embeddings=32", "data.kind=synthetic",
             f"data.tokenizer={own}", "train.steps=1", "train.global_batch_size=8",
             "train.sequence_length=16", f"run.dir={tmp_path / 'run'}"]  # fmt: skip
    assert train(load([], words)) == 0
    out = tmp_path / "out"
    assert export_run(str(tmp_path / "run"), str(out), None, None, 10**9) == 0
    ours = HuggingFaceTokenizer(own / "tokenizer.json")
    ids = {"bos_token_id": ours.bos_id, "eos_token_id": ours.eos_id}
    assert ids.items() <= json.loads((out / "config.json").read_text()).items()
    assert json.loads((out / "generation_config.json").read_text()) == ids
    theirs = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert theirs.encode("so be it").ids == [ours.bos_id, *ours.encode("so be it")]
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and settings["chat_template"]
    # Read again it is the same tokenizer, and begins rows once.
    again = HuggingFaceTokenizer(out / "tokenizer.json")
    assert (again.bos_id, again.eos_id, again.encode("so")) == (ours.bos_id, ours.eos_id, ours.encode("so"))
    assert again.begun() == {} and again.chat_prompt(TURN) == ours.chat_prompt(TURN)
    assert check_model(str(out)) == 0 and "would not stop" not in capfd.readouterr().out
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    (out / "generation_config.json").unlink()
    assert check_model(str(out)) == 0
    assert f"eos_token_id is 7, and the tokenizer ends a text with {ours.eos_id}" in capfd.readouterr().out


def test_weights_of_another_family_are_told_by_its_name_first(tmp_path: Path) -> None:
    model = FIXTURES / "llama-plain"
    config = load([], ["model.kind=llama", f"model.config={model}", f"run.init_from={FIXTURES / 'gpt2-plain'}",
                       f"run.dir={tmp_path / 'run'}", "data.kind=synthetic", "train.sequence_length=16"])  # fmt: skip
    program, _ = program_for(config, jax.devices()[:1])
    with pytest.raises(InputError) as error:
        fresh_state(program, config)
    assert "is a gpt2, and the model here is a llama" in error.value.faults[0]


def test_biases_of_routers_leave_in_float32(tmp_path: Path) -> None:
    import_model(str(FIXTURES / "deepseek_v3-plain"), str(tmp_path / "run"), [])
    export_run(str(tmp_path / "run"), str(tmp_path / "out"), None, "bfloat16", 10**9)
    before, after = (
        load_file(d / "model.safetensors") for d in (FIXTURES / "deepseek_v3-plain", tmp_path / "out")
    )
    for name, value in after.items():
        exact = name.endswith("e_score_correction_bias")
        assert value.dtype == (np.float32 if exact else ml_dtypes.bfloat16), name
        if exact:
            np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    ("name", "word", "says"),
    [
        ("llama-plain", "model.sliding_window=5", "train it as model.kind mistral"),
        ("mixtral-plain", "model.capacity_factor=1.5", "transformers drops no rows"),
        ("mixtral-plain", "model.router_bias_update_rate=0.001", "no place for the router's biases"),
    ],
)
def test_what_transformers_would_compute_otherwise_is_not_exported(
    name: str, word: str, says: str, tmp_path: Path
) -> None:
    import_model(str(FIXTURES / name), str(tmp_path / "run"), [word])
    with pytest.raises(ConfigError, match=says):
        export_run(str(tmp_path / "run"), str(tmp_path / "out"), None, None, 10**9)
    assert not (tmp_path / "out").exists()


def test_dropout_of_attention_weights_keeps_no_model_out(tmp_path: Path) -> None:
    source = copied("gpt2-plain", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "attn_pdrop": 0.1}))
    assert check_model(str(source)) == 0
    assert import_model(str(source), str(tmp_path / "run"), []) == 0


def _broken(kind: str, at: Path) -> None:
    file = at / "model.safetensors"
    if kind == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "no header":
        file.write_bytes(b"\xff" * 64)
    elif kind == "pickled":
        file.rename(at / "pytorch_model.bin")
    elif kind == "index":
        (at / INDEX).write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    else:
        tensors = load_file(file)
        if kind == "missing":
            del tensors["model.norm.weight"]
        elif kind == "more":
            tensors["lm_head.bias"] = np.zeros(3)
        else:
            tensors["model.norm.weight"] = np.zeros(3)
        save_file(tensors, file)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("cut short", "no whole safetensors file"),
        ("no header", "no whole safetensors file"),
        ("pickled", "pytorch_model.bin can hold code and is not read"),
        ("index", "names ../elsewhere.safetensors"),
        ("missing", "model.norm.weight is missing"),
        ("more", "lm_head.bias is no tensor of this model"),
        ("shape", "model.norm.weight has shape"),
    ],
)
def test_files_that_are_no_such_model_are_refused_by_name(kind: str, says: str, tmp_path: Path) -> None:
    source = copied("llama-plain", tmp_path / "source")
    _broken(kind, source)
    with pytest.raises(InputError, match=says):
        check_model(str(source))
    with pytest.raises(InputError, match=says):
        import_model(str(source), str(tmp_path / "run"), [])


def test_directories_that_are_taken_or_no_runs_are_refused(tmp_path: Path) -> None:
    source = str(FIXTURES / "llama-plain")
    with pytest.raises(InputError, match="is no run's directory"):
        export_run(source, str(tmp_path / "out"), None, None, 10**9)
    import_model(source, str(tmp_path / "run"), [])
    with pytest.raises(InputError, match="is a run already"):
        import_model(source, str(tmp_path / "run"), [])
    with pytest.raises(InputError, match="is not empty"):
        export_run(str(tmp_path / "run"), source, None, None, 10**9)


def test_names_of_the_hub(tmp_path: Path, monkeypatch: Any) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    assert is_saved_model("hf://org/name") and not is_saved_model(tmp_path)
    for wrong in ("hf://", "hf://a/b/c", "hf://../x"):
        with pytest.raises(ConfigError, match="takes hf://org/name"):
            local(wrong, "model.config", "config")
    # The cache as huggingface_hub keeps it; nothing is fetched.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--org--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    copied("llama-plain", kept / "snapshots" / ("0" * 40))
    assert local("hf://org/name", "run.init_from", "weights") == kept / "snapshots" / ("0" * 40)
    assert check_model("hf://org/name") == 0
    with pytest.raises(InputError, match=r"model.config: hf://org/other is not in the cache"):
        local("hf://org/other", "model.config", "config")


def test_a_run_says_with_what_it_begins(tmp_path: Path, capfd: Any) -> None:
    words = ["model.kind=llama", f"model.config={FIXTURES / 'llama-plain'}", "data.kind=synthetic", "train.steps=1",
             "train.global_batch_size=8", "train.sequence_length=16", f"run.init_from={FIXTURES / 'llama-plain'}",
             "model.vocab_size=259", f"run.dir={tmp_path / 'run'}"]  # fmt: skip
    with pytest.raises(InputError, match="embed_tokens"):
        train(load([], words))
    tokenizer = {
        **json.loads((CHAT / "tokenizer.json").read_text()),
        "added_tokens": [],
        "post_processor": None,
    }
    tokenizer["model"] = {**tokenizer["model"], "vocab": {"a": 0, "b": 1}, "merges": []}
    (tmp_path / "few.json").write_text(json.dumps(tokenizer))
    words = [*words[:-2], f"run.dir={tmp_path / 'run'}", f"data.tokenizer={tmp_path / 'few.json'}"]
    capfd.readouterr()
    assert train(load([], words)) == 0
    assert f"begins with parameters of {FIXTURES / 'llama-plain'}" in "".join(capfd.readouterr())
