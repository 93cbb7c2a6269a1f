"""Settings of low-rank adapters."""

from __future__ import annotations

import math

from dsjax.config.fields import (
    BelowOne,
    NonEmpty,
    NonNegativeInt,
    PatternList,
    PositiveFloat,
    Section,
    described,
)


class LoraConfig(Section):
    """Low-rank adapters beside frozen matrices (LoRA, Hu et al. 2021)."""

    rank: NonNegativeInt = described(
        0,
        "Rank of the adapters; 0: there are none. With adapters only they train, and what optimizer.trainable names.",
    )
    alpha: PositiveFloat = described(16.0, "What an adapter adds is multiplied by alpha / rank.")
    rank_stabilized: bool = described(
        False, "Multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023), which suits high ranks."
    )
    dropout: BelowOne = described(0.0, "Dropout of what goes into an adapter.")
    targets: PatternList = described(
        [],
        "Path patterns of the layers that get one, as layers/attention/*_proj, or the last part of their paths, as "
        "q_proj. Default: all that multiply by a matrix of their own (not embeddings, head, routers and experts).",
    )
    init_from: NonEmpty | None = described(
        None,
        "Start with adapters that the PEFT library saved: their directory. Default: fresh ones, that add 0.",
    )

    @property
    def scale(self) -> float:
        """Factor of what an adapter adds."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
