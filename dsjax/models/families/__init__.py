"""The families of models by their names, which are Hugging Face's `model_type`."""

from __future__ import annotations

from dsjax.models.families.base import FamilyConfig
from dsjax.models.families.deepseek import DeepseekV3Config
from dsjax.models.families.gemma import Gemma2Config, Gemma3TextConfig
from dsjax.models.families.gpt2 import GPT2Config
from dsjax.models.families.llama import LlamaConfig, MistralConfig
from dsjax.models.families.mixtures import MixtralConfig, Qwen3MoeConfig
from dsjax.models.families.olmo import Olmo2Config
from dsjax.models.families.qwen import Qwen2Config, Qwen3Config

__all__ = ["FAMILIES", "FamilyConfig"]

FAMILIES: dict[str, type[FamilyConfig]] = {
    family.model_type: family
    for family in (
        LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Gemma2Config, Gemma3TextConfig, GPT2Config, Olmo2Config,
        MixtralConfig, Qwen3MoeConfig, DeepseekV3Config,
    )
}  # fmt: skip
