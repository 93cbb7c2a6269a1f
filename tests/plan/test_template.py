"""Starting configs: valid, of the size of the cluster, and with the layout that fits."""

from __future__ import annotations

import json

import pytest

from dsjax import aot
from dsjax.config import load
from dsjax.errors import ConfigError
from dsjax.plan import analytic
from dsjax.plan.template import as_yaml, presets, starting_config


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b", "llama3-405b", "llama3.2-1b"])
def test_a_preset_has_the_published_number_of_parameters(model):
    assert model in presets()
    config = starting_config(model, aot.parse_target("128x8xH100"))
    laid = analytic.lay_out(config, aot.parse_target("128x8xH100"), None)
    sizes = laid.sizes
    total = sizes.layers * sizes.layer + sizes.hidden * sizes.vocabulary * (1 if sizes.tied else 2)
    billions = {"llama3-8b": 8.03, "llama3-70b": 70.55, "llama3-405b": 405.8, "llama3.2-1b": 1.236}[model]
    assert total / 1e9 == pytest.approx(billions, rel=0.003)
    assert analytic.memory(laid).fits


def test_sixteen_gpus_get_32_sequences_in_8_microbatches(tmp_path):
    target = aot.parse_target("2x8xH100")
    config = starting_config("llama3-8b", target)
    path = tmp_path / "c.yaml"
    path.write_text(as_yaml(config, target, "c.yaml"))
    again = load([path], environ={})
    assert (again.train.global_batch_size, again.train.gradient_accumulation_steps) == (32, 8)
    assert again.mesh == config.mesh and again.train == config.train and again.model == config.model
    assert "dsjax plan c.yaml --on 2x8xH100 --search" in path.read_text()


def test_a_larger_model_gets_more_shards_and_recomputation():
    small, large = (starting_config(m, aot.parse_target("8x8xH100")) for m in ("llama3-8b", "llama3-70b"))
    assert large.mesh.fsdp * large.mesh.tensor > small.mesh.fsdp * small.mesh.tensor
    assert large.train.remat == "full" and large.optimizer.learning_rate < small.optimizer.learning_rate


def test_experts_are_shared_out_inside_a_node_first():
    config = starting_config("deepseek-v3-16b", aot.parse_target("2x8xH100"))
    assert config.mesh.expert > 1 and 8 % (config.mesh.expert * config.mesh.tensor) == 0
    assert analytic.memory(analytic.lay_out(config, aot.parse_target("2x8xH100"), None)).fits


def test_a_hugging_face_config_is_a_model_too(tmp_path):
    sizes = {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 512, "vocab_size": 1024, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = starting_config(str(tmp_path / "config.json"), aot.parse_target("1xH100"))
    assert config.model.config == str(tmp_path / "config.json") and config.mesh.fsdp == 1


def test_an_unknown_model_is_one_line_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean llama3-8b") as refused:
        starting_config("llama3-8", aot.parse_target("8xH100"))
    assert len(refused.value.faults) == 1
