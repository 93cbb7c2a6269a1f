"""A starting config for a model and a cluster, by size alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from dsjax.aot import Target
from dsjax.config import Config, from_dict, load
from dsjax.config.messages import nearest
from dsjax.config.yaml_core import dump_values
from dsjax.errors import ConfigError, InputError
from dsjax.mesh.axes import divisors
from dsjax.models import build
from dsjax.plan import analytic
from dsjax.plan.settings import with_settings

# Two sequences a device and step, in eight microbatches: four devices share a sequence then.
_SEQUENCES, _MICROBATCHES, _TENSOR = 2, 8, 4
_LONGEST = 8192
_REMATS = ("none", "dots", "full")
# Peak learning rates of the Llama 3 report (Dubey et al. 2024) by parameters.
_RATES = ((2e11, 8e-5), (3e10, 1.5e-4), (0, 3e-4))
_ROOM = 0.9  # of the limit, for what formulas get wrong


def presets() -> dict[str, Path]:
    """Names of known models and their files."""
    folder = Path(str(files("dsjax.plan").joinpath("presets")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def starting_config(model: str, target: Target) -> Config:
    """A config that trains a model on a cluster.

    Args:
      model: a preset's name, or a Hugging Face config.json or its directory.

    Raises:
      ConfigError: an unknown model, or one that divides over no mesh of the cluster.
      InputError: a config.json that cannot be read.
    """
    base = _model(model)
    batch = _SEQUENCES * target.size
    length = min(_LONGEST, _positions(base))
    config = base.model_copy(
        update={
            "run": base.run.model_copy(update={"name": run_name(model, target)}),
            "train": base.train.model_copy(update={"global_batch_size": batch, "sequence_length": length}),
        }
    )
    least: tuple[int, Config, analytic.Laid] | None = None
    faults: list[str] = []
    for settings in _layouts(target, batch, _experts(config)):
        tried = with_settings(config, settings)
        try:
            laid = analytic.lay_out(tried, target, _vocabulary(tried))
        except ConfigError as error:
            faults = faults or error.faults
            continue
        memory = analytic.memory(laid)
        if least is None or memory.total < least[0]:
            least = memory.total, tried, laid
        if memory.total <= _ROOM * memory.limit:
            least = memory.total, tried, laid
            break
    if least is None:
        raise ConfigError(faults)
    _, chosen, laid = least
    parameters = laid.sizes.layers * laid.layer
    rate = next(rate for least, rate in _RATES if parameters >= least)
    return with_settings(chosen, {"optimizer.learning_rate": rate})


def fits(config: Config, target: Target) -> bool:
    """Whether a config's step fits on a cluster, by formulas."""
    return analytic.memory(analytic.lay_out(config, target, _vocabulary(config))).fits


def as_yaml(config: Config, target: Target, path: str) -> str:
    """The config's text: what was chosen, and how to go on."""
    train = ("steps", "global_batch_size", "sequence_length", "gradient_accumulation_steps", "remat")
    values: dict[str, Any] = {
        "run": {"name": config.run.name},
        "model": {k: v for k, v in config.model.model_dump().items() if v is not None},
        "mesh": {
            axis: size for axis, size in config.mesh.model_dump().items() if size != 1 or axis == "fsdp"
        },
        "train": {key: getattr(config.train, key) for key in train},
        "data": {"kind": config.data.kind, "tokenizer": config.data.tokenizer},
        "optimizer": {"learning_rate": config.optimizer.learning_rate},
    }
    return (
        f"# A start for {target.name}, by size alone. What it takes, and a faster layout:\n"
        f"#   dsjax plan {path} --on {target.name} --search --write {path}\n"
        f"# Set data.kind, data.paths and data.tokenizer to your own (synthetic makes tokens from the seed).\n"
        f"{dump_values(values)}"
    )


def run_name(model: str, target: Target) -> str:
    """Of a model and a cluster."""
    path = Path(model)
    stem = model if model in presets() else path.parent.name if path.name == "config.json" else path.stem
    return f"{stem or 'model'}-{target.name.replace(':', '-')}"


def _model(name: str) -> Config:
    known = presets()
    if name in known:
        return load([known[name]], environ={})
    if Path(name).expanduser().exists():
        return from_dict({"model": {"config": name}})
    close = nearest(name, known, 0.5)
    guess = f"did you mean {close}? " if close else ""
    raise ConfigError(
        f"--model: no model is called {name}; {guess}known: {', '.join(known)} (or the path of a Hugging Face "
        "config.json)"
    )


def _positions(config: Config) -> int:
    """The longest sequence that the model knows."""
    if config.model.config is None:
        return int(config.model.fields["max_position_embeddings"])
    path = Path(config.model.config).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        told = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"--model: {path} cannot be read as a model's config.json ({error})") from None
    return told if isinstance(told, int) else _LONGEST


def _vocabulary(config: Config) -> int | None:
    return None if config.model.config or config.model.fields.get("vocab_size") else 258


def _experts(config: Config) -> int:
    """Experts of a layer, 0 where there are none."""
    family = build(config.model, platform="gpu", vocab_size_hint=_vocabulary(config)).family
    return family.experts if family else 0


def _layouts(target: Target, batch: int, experts: int) -> Iterator[dict[str, Any]]:
    """Layouts to try: tensor inside a node, the fewest shards of the state first, the least recomputation first.

    Experts are shared out inside a node as far as they can, and over more only for what is too large otherwise; there,
    the sequence is cut too, and microbatches are as small as can be.
    """
    node = target.devices_per_host
    for tensor in sorted((t for t in divisors(node) if t <= _TENSOR), reverse=True):
        shards, near = target.size // tensor, node // tensor
        expert = math.gcd(experts, near) if experts else 1
        micro = max(m for m in divisors(_MICROBATCHES) if batch % (m * shards) == 0)
        for fsdp in (f for f in divisors(shards // expert) if f * expert >= near):
            for remat in _REMATS:
                yield _settings(shards // (fsdp * expert), fsdp, expert, 1, tensor, micro, remat)
    for context in (1, 2, 4, 8):
        if target.size % (node * context) == 0:
            shards = target.size // (node * context)
            for expert in divisors(math.gcd(experts, shards)) if experts else [1]:
                yield _settings(1, shards // expert, expert, context, node, batch // shards, "full")


def _settings(
    data: int, fsdp: int, expert: int, context: int, tensor: int, micro: int, remat: str
) -> dict[str, Any]:
    mesh = {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.context": context, "mesh.tensor": tensor}
    of_experts = {"mesh.expert": expert} if expert > 1 else {}
    return {**mesh, **of_experts, "train.gradient_accumulation_steps": micro, "train.remat": remat}
