"""Mixtures of experts: a router, experts, and rows on their way between the two."""

from dsjax.models.moe.block import Mixture, MixtureConfig, mixture_axes, mixture_extras
from dsjax.models.moe.router import Routing, balanced

__all__ = ["Mixture", "MixtureConfig", "Routing", "balanced", "mixture_axes", "mixture_extras"]
