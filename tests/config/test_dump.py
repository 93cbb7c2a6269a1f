"""What `dump` writes, `load` reads back equal; what a resume may change."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.config import FREE_ON_RESUME, Config, changed, dump, from_dict, load
from dsjax.config.messages import section_of, walk

# Any text that UTF-8 can hold, and what is easily mistaken for another type or for syntax.
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", "off", "true", "null", "~", "1_000", "3e-4", "1e3", "0x1f", "0o7", "2020-01-01", "=", "<<", "- a",
     "a: b", "# a", "*a", "&a", "!a", "%a", "@a", "\n", " a ", "a\n\nb\n", "\t", "\u2028", "\x85", ".inf",
     "12:30", "'", '"', "'\\\"", "---", "..."]
)  # fmt: skip
_SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT
_KEY = _TEXT.filter(lambda key: key != "<<")
_VALUE = st.recursive(
    _SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEY, inner, max_size=3),
    max_leaves=6,
)
_CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "run": st.fixed_dictionaries(
            {"seed": st.integers(0, 2**32 - 1)}, optional={"dir": _TEXT.filter(bool), "init_from": st.none()}
        ),
        "model": st.dictionaries(_KEY.filter(lambda key: key not in ("kind", "config")), _VALUE, max_size=4),
        "eval": st.fixed_dictionaries(
            {"sets": st.dictionaries(_KEY.filter(bool), st.lists(_TEXT.filter(bool), min_size=1, max_size=2))}
        ),
        "optimizer": st.fixed_dictionaries(
            {},
            optional={
                "learning_rate": st.floats(0, 1e300) | st.integers(0, 10**20),
                "max_grad_norm": st.none() | st.floats(1e-300, 1e300),
                "trainable": st.lists(_TEXT.filter(bool), max_size=2),
            },
        ),
        "data": st.fixed_dictionaries(
            {
                "kind": st.just("jsonl"),
                "mixture": st.just([{"paths": "a", "weight": 2}, {"paths": ["b", "c"]}]),
            }
        ),
    },
)


@settings(max_examples=150, deadline=None)
@given(_CONFIGS)
def test_dump_loads_back_equal(values):
    config = from_dict(values)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.yaml"
        path.write_text(dump(config), encoding="utf-8", newline="")
        again = load([path], [], {})
    assert again == config
    assert repr(again) == repr(config)  # tells 1 from 1.0 and from True
    assert changed(config, again) == []


@settings(max_examples=100, deadline=None)
@given(_TEXT)
def test_any_text_is_a_config_or_a_config_error(text):
    from dsjax.errors import ConfigError

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "any.yaml"
        path.write_text(text, encoding="utf-8", newline="")
        try:
            load([path], [f"run.name={text}"], {})
        except ConfigError as error:
            assert error.faults and all("\n" not in fault for fault in error.faults)


# A value other than the default for every key, so that no key's freedom is decided by accident.
_OTHER = {
    "run.name": "other", "run.dir": "elsewhere", "run.seed": 1, "run.resume": "must", "run.init_from": "x",
    "runtime.platform": "cpu", "runtime.cpu_devices": 2, "runtime.distributed": "none",
    "runtime.distributed_timeout": 1, "runtime.compilation_cache": None, "runtime.xla_preset": "none",
    "model.kind": "a:b", "model.config": "c.json",
    "mesh.pipeline": 2, "pipeline.schedule": "gpipe", "pipeline.microbatches": 4, "pipeline.virtual_stages": 2,
    "pipeline.recompute": False, "pipeline.layers": [1, 2], "pipeline.rebalance_every": 1,
    "pipeline.rebalance_gain": 0.5,
    "mesh.data": 2, "mesh.fsdp": 2, "mesh.context": 2, "mesh.expert": 2, "mesh.tensor": 2,
    "train.steps": 2000, "train.stop_after": 1, "train.global_batch_size": 4, "train.sequence_length": 2,
    "train.gradient_accumulation_steps": 2, "train.remat": "full", "train.fsdp_gather": "step",
    "grad_sync.codec": "int4", "grad_sync.block": 64, "grad_sync.error_feedback": False,
    "grad_sync.feedback_decay": 0.5, "grad_sync.stochastic": True, "grad_sync.hadamard": True,
    "grad_sync.fraction": 0.1, "grad_sync.warmup_steps": 2,
    "grad_sync.min_size": 1, "grad_sync.dense": ["x"], "grad_sync.dense_dtype": "bfloat16",
    "grad_sync.route": "flat", "grad_sync.topology": {"node": 8}, "grad_sync.overlap": True,
    "grad_sync.bucket_bytes": 1, "diloco.inner_steps": 2, "diloco.outer_learning_rate": 1.0,
    "diloco.outer_momentum": 0.5,
    "data.kind": "text", "data.field": "x", "data.tokenizer": "x", "data.bpe_vocab_size": 300,
    "data.packing": "none", "data.shuffle": False, "data.holdout": 0.5, "data.cache_dir": "x",
    "data.workers": 1,
    "data.log_examples": True, "data.paths": ["moved"], "data.mixture": [{"paths": "a"}],
    "eval.every": 1, "eval.steps": 1, "eval.sets": {"a": "b"},
    "eval.compressors": ["xz"], "eval.samples": ["def "], "eval.sample_tokens": 1,
    "optimizer.kind": "sgd", "optimizer.learning_rate": 1.0, "optimizer.beta1": 0.1, "optimizer.beta2": 0.1,
    "optimizer.eps": 1.0, "optimizer.weight_decay": 0.0, "optimizer.max_grad_norm": None,
    "optimizer.state_dtype": "int8",
    "lora.rank": 2, "lora.alpha": 1.0, "lora.dropout": 0.5, "lora.targets": ["x"], "lora.rank_stabilized": True,
    "lora.init_from": "x",
    "optimizer.trainable": ["x"], "optimizer.schedule.kind": "wsd", "optimizer.schedule.warmup_steps": 1,
    "optimizer.schedule.decay_steps": 1, "optimizer.schedule.min_lr_ratio": 0.0,
    "precision.policy": "bf16", "precision.table": {"norm": "bf16"}, "precision.fp8.scaling": "block",
    "precision.fp8.history": 1, "precision.params": "bfloat16", "precision.gradients": "bfloat16",
    "precision.loss_scale.initial": 2.0, "precision.loss_scale.growth_interval": 1,
    "precision.loss_scale.hysteresis": 1, "precision.loss_scale.minimum": 2.0, "precision.loss_scale.maximum": 2.0**20,
    "precision.loss_scale.target_rate": 0.1, "stability.give_up_after": 1, "stability.clip": "median",
    "stability.clip_factor": 2.0, "stability.clip_window": 7, "stability.clip_groups": "parts",
    "stability.on_nonfinite": "rollback", "stability.rollback_after": 1, "stability.spike": None,
    "stability.check_replicas_every": 1, "stability.check_recompute_every": 1, "stability.locate_nonfinite": False,
    "stability.max_rollbacks": 1, "stability.rollback_learning_rate": 0.5, "stability.rollback_steps": 1,
    "checkpoint.disk.every": 1, "checkpoint.disk.keep": 1, "checkpoint.disk.path": "x",
    "checkpoint.disk.every_minutes": 1.5, "checkpoint.disk.keep_every": 5, "checkpoint.disk.keep_best": 1,
    "checkpoint.disk.best_metric": "heldout.perplexity", "checkpoint.disk.compression": "zstd",
    "checkpoint.disk.retries": 0, "checkpoint.memory.every": 1, "checkpoint.memory.keep": 1,
    "checkpoint.memory.budget_gib": 1.5, "checkpoint.memory.path": "x", "checkpoint.memory.buddy": False,
    "checkpoint.remote.urls": ["file:///x"], "checkpoint.remote.every_minutes": 1.5, "checkpoint.remote.keep": 1,
    "checkpoint.remote.bandwidth_mb": 1.5,
    "observe.log_every": 1, "observe.progress": "none", "observe.tensorboard": True,
    "observe.wandb.project": "x", "observe.wandb.entity": "x", "observe.wandb.mode": "offline",
    "observe.prometheus_port": 1, "observe.profile.start": 1, "observe.profile.steps": 1,
}  # fmt: skip
_FREE = {
    "run.name", "run.dir", "run.resume", "runtime", "mesh", "pipeline", "train.steps", "train.stop_after", "data.paths",
    "train.gradient_accumulation_steps", "train.remat", "train.fsdp_gather", "data.workers", "data.cache_dir",
    "data.log_examples", "eval", "checkpoint", "observe", "grad_sync.route", "grad_sync.topology",
    "grad_sync.overlap", "grad_sync.bucket_bytes", "stability.give_up_after", "stability.max_rollbacks",
    "stability.locate_nonfinite", "stability.check_replicas_every", "stability.check_recompute_every",
}  # fmt: skip


def test_every_key_has_another_value_to_try():
    keys = {key for key, field in walk() if section_of(field.annotation) is None}
    assert keys == _OTHER.keys()
    assert _FREE | {"data.mixture.*.paths"} == set(FREE_ON_RESUME)


@pytest.mark.parametrize("key", _OTHER)
def test_what_a_resume_may_change(key):
    base = {"data": {"kind": "jsonl", "paths": "a"}}
    if key == "data.mixture":
        base = {"data": {"kind": "jsonl", "mixture": [{"paths": "b"}]}}
    if key == "lora.init_from":
        base = {"lora": {"rank": 2}}
    other = Config.model_validate(base).model_dump()
    *sections, leaf = key.split(".")
    node = other
    for section in sections:
        node = node[section]
    node[leaf] = _OTHER[key]
    found = changed(from_dict(base), from_dict(other))
    # data.mixture differs in paths alone here, which is where the data lies, not what it is
    free = key == "data.mixture" or any(key == name or key.startswith(name + ".") for name in _FREE)
    told = f"{key}.norm" if key == "precision.table" else key  # of a table each entry is told
    assert [fault.partition(":")[0] for fault in found] == ([] if free else [told])
    if not free:
        assert "--allow-config-change" in found[0]


def test_changes_of_a_model_and_a_mixture_are_told_by_key():
    data = {"kind": "jsonl", "mixture": [{"paths": "a", "weight": 1}]}
    old = from_dict({"model": {"size": {"x": 1}, "bias": 1, "depth": 2}, "data": data})
    data = {"kind": "jsonl", "mixture": [{"paths": "elsewhere/a", "weight": 2}]}
    new = from_dict({"model": {"size": {"x": 2}, "bias": True, "width": 3}, "data": data})
    assert [fault.split(";")[0] for fault in changed(old, new)] == [
        "model.size.x: the run was started with 1, now it is 2",
        "model.bias: the run was started with 1, now it is true",
        "model.depth: the run was started with 2, now it is not set",
        "model.width: the run was started with not set, now it is 3",
        "data.mixture.0.weight: the run was started with 1.0, now it is 2.0",
    ]
    more = from_dict({"data": {"kind": "jsonl", "mixture": [*data["mixture"], {"paths": "b"}]}})
    assert changed(new, more)[-1].startswith("data.mixture: the run was started with [{")
