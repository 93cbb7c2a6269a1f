"""Models: families by name, and the user's own by `module:function`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from dsjax.config.messages import nearest, takes, unknown_key
from dsjax.config.schema import ModelConfig
from dsjax.config.yaml_core import show
from dsjax.errors import ConfigError, InputError
from dsjax.hf.hub import local
from dsjax.models.decoder import Decoder
from dsjax.models.families import FAMILIES, FamilyConfig
from dsjax.models.spec import ModelSpec, Stages, Trunk
from dsjax.models.user import users_model

__all__ = ["FAMILIES", "Decoder", "ModelSpec", "Stages", "Trunk", "build"]

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
    family = FAMILIES[config.kind]
    fields = _known(family, config) if config.config else {}
    fields |= _renamed(family, config.fields)
    fields = _with_data(family, fields, vocab_size_hint, max_length)
    return spec_of(_checked(family, fields), platform, remat, max_length)


def spec_of(
    family: FamilyConfig, platform: str, remat: str = "none", max_length: int | None = None
) -> ModelSpec:
    """The model of a checked config; arguments as for `build`."""
    frame = family.frame()
    length = max_length or getattr(family, family.positions_field)
    unroll = platform == "cpu" and remat == "none" and family.layers * length <= _UNROLLED_ON_CPU
    room, most = _LOGITS.get(platform, _LOGITS_ELSEWHERE)
    chunk = min(most, room // (4 * family.padded_vocab) // 128 * 128)
    return ModelSpec(
        init=lambda rngs: Decoder(frame, remat=remat, unroll=unroll, rngs=rngs),
        param_axes=family.param_axes(),
        vocab_size=family.vocab_size,
        flops_per_token=family.flops_per_token,
        cross_entropy_chunk=max(128, chunk),
        has_hidden=True,
        remat_by_layer=True,
        trunk=frame.trunk,
        family=family,
        after_step=family.after_step(),
    )


def _checked(kind: type[FamilyConfig], fields: Mapping[str, Any]) -> FamilyConfig:
    names = list(kind.model_fields)
    try:
        family = kind(**fields)
    except ValidationError as error:
        faults = []
        for item in error.errors(include_url=False):
            name = str(item["loc"][0])
            if item["type"] == "extra_forbidden":
                faults.append(unknown_key(f"model.{name}", show(item["input"]), names))
                continue
            known = kind.model_fields[name]
            wanted = takes(known.annotation, known.metadata)
            missing = item["type"] == "missing"
            faults.append(
                f"model.{name}: is missing; it takes {wanted} (or set model.config to a config.json)"
                if missing
                else f"model.{name}: takes {wanted}, got {show(fields[name])}"
            )
        raise ConfigError(list(dict.fromkeys(faults))) from None
    family.check()
    return family


def _renamed(family: type[FamilyConfig], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {family.renamed.get(name, name): value for name, value in fields.items()}


def _with_data(
    family: type[FamilyConfig], fields: dict[str, Any], vocab_size_hint: int | None, max_length: int | None
) -> dict[str, Any]:
    """The fields, and what follows from the data."""
    if vocab_size_hint is not None:
        vocabulary = fields.setdefault("vocab_size", vocab_size_hint)
        if isinstance(vocabulary, int) and 0 < vocabulary < vocab_size_hint:
            raise ConfigError(
                f"model.vocab_size: {vocabulary} is smaller than the tokenizer's {vocab_size_hint} tokens; "
                f"use at least {vocab_size_hint}, or leave it out"
            )
    name = family.positions_field
    positions = fields.setdefault(name, max(max_length or 0, _POSITIONS))
    if max_length is not None and isinstance(positions, int) and 0 < positions < max_length:
        raise ConfigError(
            f"train.sequence_length: {max_length} is more than model.{name} {positions}; "
            "shorten the sequences or raise it (with rope_scaling, where the weights are trained already)"
        )
    return fields


def _saved_fields(config: ModelConfig) -> dict[str, Any]:
    """What a config.json says."""
    path = local(str(config.config), "model.config", "config")
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
    return values


def _of_blocks(name: str, value: Any) -> bool:
    """Whether a field says that weights lie in scaled blocks of 8 bits: once read they are as any others."""
    return name == "quantization_config" and isinstance(value, dict) and value.get("quant_method") == "fp8"


def _known(family: type[FamilyConfig], config: ModelConfig) -> dict[str, Any]:
    """Of the fields of a config.json those that the family has.

    Raises:
      ConfigError: there are others that may change the model's numbers.
    """
    fields, faults = {}, []
    for name, value in _renamed(family, _saved_fields(config)).items():
        known = family.model_fields.get(name)
        if known is not None:
            # In a file null is how a field that is not used is written.
            if value is not None or type(None) in get_args(known.annotation):
                fields[name] = value
        elif value is not None and name not in family.passed_over and not _of_blocks(name, value):
            faults.append(
                f"model.config: {config.config} has {name} {show(value)}, which is not supported for "
                f"{family.model_type}; take it out of the file if the model is the same without it"
            )
    if faults:
        raise ConfigError(faults)
    return fields
