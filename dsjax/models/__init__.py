"""Models: families by name, and the user's own by `module:function`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dsjax.config.messages import nearest, takes, unknown_key
from dsjax.config.schema import ModelConfig
from dsjax.config.yaml_core import show
from dsjax.errors import ConfigError, InputError
from dsjax.models.llama import Llama, LlamaConfig, param_axes, trunk
from dsjax.models.spec import ModelSpec, Stages, Trunk
from dsjax.models.user import users_model

__all__ = ["FAMILIES", "Llama", "LlamaConfig", "ModelSpec", "Stages", "Trunk", "build"]

FAMILIES = ("llama",)
# In the chunked cross-entropy logits of so many bytes a device exist at a time, of 128 tokens at least and
# so many at most: (bytes, tokens).
_LOGITS = {"cpu": (8 << 20, 512)}
_LOGITS_ELSEWHERE = (256 << 20, 4096)
# Positions of a model of which neither config nor data say more, as in Hugging Face configs.
_POSITIONS = 2048
# On a CPU layers are written out up to this many layers x positions: that runs faster than a loop, and
# compiling it still takes seconds.
_UNROLLED_ON_CPU = 3072


def build(
    config: ModelConfig,
    *,
    platform: str,
    vocab_size_hint: int | None = None,
    remat: str = "none",
    max_length: int | None = None,
) -> ModelSpec:
    """The model that a config's `model` section names.

    Args:
      platform: cpu, gpu or tpu; chooses how, not what, is computed.
      vocab_size_hint: the tokenizer's; the default of `vocab_size`, which may not be smaller.
      remat: none, full, dots or every_N.
      max_length: tokens of the longest sequence to be trained on; `max_position_embeddings` may not be
        smaller.

    Raises:
      ConfigError: unknown family or fields, impossible sizes, a function that cannot be imported or called.
      InputError: a config.json that cannot be read.
    """
    if ":" in config.kind:
        return users_model(config.kind, config.fields, remat)
    if config.kind not in FAMILIES:
        near = nearest(config.kind, FAMILIES)
        hint = f"did you mean {near}?" if near else f"it takes {', '.join(FAMILIES)} or module:function"
        raise ConfigError(f"model.kind: unknown family {config.kind}; {hint}")
    fields = _family_fields(config, vocab_size_hint, max_length)
    return _llama(fields, platform, remat, max_length)


def _llama(fields: Mapping[str, Any], platform: str, remat: str, max_length: int | None) -> ModelSpec:
    llama = _checked(fields)
    size = llama.num_hidden_layers * (max_length or llama.max_position_embeddings)
    unroll = platform == "cpu" and remat == "none" and size <= _UNROLLED_ON_CPU
    room, most = _LOGITS.get(platform, _LOGITS_ELSEWHERE)
    chunk = min(most, room // (4 * llama.padded_vocab) // 128 * 128)
    return ModelSpec(
        init=lambda rngs: Llama(llama, remat=remat, unroll=unroll, rngs=rngs),
        param_axes=param_axes(llama),
        vocab_size=llama.vocab_size,
        flops_per_token=llama.flops_per_token,
        cross_entropy_chunk=max(128, chunk),
        has_hidden=True,
        remat_by_layer=True,
        trunk=trunk(llama),
    )


def _checked(fields: Mapping[str, Any]) -> LlamaConfig:
    names = list(LlamaConfig.model_fields)
    try:
        llama = LlamaConfig(**fields)
    except ValidationError as error:
        faults = []
        for item in error.errors(include_url=False):
            name = str(item["loc"][0])
            if item["type"] == "extra_forbidden":
                faults.append(unknown_key(f"model.{name}", show(item["input"]), names))
                continue
            known = LlamaConfig.model_fields[name]
            wanted = takes(known.annotation, known.metadata)
            missing = item["type"] == "missing"
            faults.append(
                f"model.{name}: is missing; it takes {wanted} (or set model.config to a config.json)"
                if missing
                else f"model.{name}: takes {wanted}, got {show(item['input'])}"
            )
        raise ConfigError(list(dict.fromkeys(faults))) from None
    llama.check()
    return llama


def _family_fields(
    config: ModelConfig, vocab_size_hint: int | None, max_length: int | None
) -> dict[str, Any]:
    """The fields of config.json, the user's own over them, and what follows from the data."""
    fields = dict(_hugging_face_fields(config) if config.config else {}) | config.fields
    if vocab_size_hint is not None:
        vocabulary = fields.setdefault("vocab_size", vocab_size_hint)
        if isinstance(vocabulary, int) and 0 < vocabulary < vocab_size_hint:
            raise ConfigError(
                f"model.vocab_size: {vocabulary} is smaller than the tokenizer's {vocab_size_hint} tokens; "
                f"use at least {vocab_size_hint}, or leave it out"
            )
    positions = fields.setdefault("max_position_embeddings", max(max_length or 0, _POSITIONS))
    if max_length is not None and isinstance(positions, int) and 0 < positions < max_length:
        raise ConfigError(
            f"train.sequence_length: {max_length} is more than model.max_position_embeddings {positions}; "
            "shorten the sequences or raise it (with rope_scaling, where the weights are trained already)"
        )
    return fields


def _hugging_face_fields(config: ModelConfig) -> dict[str, Any]:
    path = Path(str(config.config)).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"model.config: {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise InputError(f"model.config: {path} cannot be read as JSON ({error})") from None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind != config.kind:
        raise ConfigError(
            f"model.config: {path} has model_type {show(kind)}, but model.kind is {config.kind}"
        )
    known = set(LlamaConfig.model_fields)
    return {name: value for name, value in values.items() if name in known and value is not None}
