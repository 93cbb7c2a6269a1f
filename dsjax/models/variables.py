"""Variables of a model that are no parameters and no statistics."""

from __future__ import annotations

from flax import nnx


class Given(nnx.Variable):
    """What a layer is told: no forward pass changes it, and it is the same on all replicas."""


class LayerNumber(Given):
    """int32 []: a layer's number in its stack; `stacked` sets it."""
