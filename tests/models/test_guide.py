"""The guide "Add a model family", followed to the letter: the class that it shows is a family that works."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture import expected, load, spec_of, tensors_of, worst
from flax import nnx

from dsjax.config import load as load_config
from dsjax.config.schema import ModelConfig
from dsjax.errors import ConfigError
from dsjax.mesh import Layout, make_mesh, named_leaves, use_layout
from dsjax.models import FAMILIES, build
from dsjax.train.hugging_face import check_model, export_run
from dsjax.train.run import train

GUIDE = Path(__file__).parents[2] / "docs" / "add-a-family.md"
CASES = ("starcoder2-plain", "starcoder2-no-biases")


@pytest.fixture(autouse=True)
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (block,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    path = tmp_path / "starcoder2.py"
    path.write_text(block)
    spec = importlib.util.spec_from_file_location("starcoder2", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "starcoder2", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(FAMILIES, "starcoder2", module.Starcoder2Config)
    yield module.Starcoder2Config


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_transformers_computes_and_gives_the_weights_back(name: str) -> None:
    tensors, want = tensors_of(name), expected(name)
    model, weights = load(spec_of(name), tensors)
    assert worst(nnx.jit(lambda model, tokens: model(tokens))(model, want["tokens"]), want["logits"]) < 1e-4
    back = weights.to_theirs(named_leaves(nnx.state(model, nnx.Param)))
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        np.testing.assert_array_equal(back[key], value, err_msg=key)


def test_it_is_cut_over_a_mesh_by_the_shared_table() -> None:
    spec = spec_of(CASES[0])
    model, _ = load(spec, tensors_of(CASES[0]))
    layout = Layout(make_mesh({"fsdp": 2, "context": 2, "tensor": 2}), spec.param_axes)
    params = nnx.state(model, nnx.Param)
    layout.check(params)
    assert all(layout.names_of(path) is not None for path in named_leaves(params))
    want = expected(CASES[0])
    with use_layout(layout):
        logits = nnx.jit(lambda model, tokens: model(tokens))(model, want["tokens"])
    assert worst(logits, want["logits"]) < 1e-4


def test_it_is_saved_as_transformers_reads_it(tmp_path: Path, capfd: Any) -> None:
    sizes = "hidden_size=16 num_hidden_layers=2 num_attention_heads=4 intermediate_size=24 vocab_size=259"
    sizes += " max_position_embeddings=32"
    words = [f"model.{word}" for word in ("kind=starcoder2 " + sizes).split()]
    words += ["data.kind=synthetic", "train.steps=1", "train.global_batch_size=8", "train.sequence_length=16"]
    assert train(load_config([], [*words, f"run.dir={tmp_path / 'run'}"])) == 0
    out = tmp_path / "out"
    assert export_run(str(tmp_path / "run"), str(out), None, None, 1 << 30) == 0
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Starcoder2ForCausalLM"]
    assert check_model(str(out)) == 0 and "no others" in capfd.readouterr().out


def test_a_class_without_the_name_of_theirs_is_refused_when_it_is_written(family: Any) -> None:
    with pytest.raises(TypeError, match="Other: set architecture"):
        type("Other", (family,), {"model_type": "other", "__annotations__": {"model_type": "ClassVar[str]"}})


def test_what_it_declares_with_one_value_is_refused_with_another() -> None:
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = ModelConfig(kind="starcoder2", vocab_size=9, residual_dropout=0.1, **fields)
    with pytest.raises(
        ConfigError, match=r"model\.residual_dropout: takes 0, as there is no such dropout here, got 0\.1"
    ):
        build(config, platform="cpu")
