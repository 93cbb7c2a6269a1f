"""A mixture of experts in place of a layer's feed-forward network.

Letters of shapes: b batch, s sequence, k choices of a token, e experts, d hidden, m feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.mesh import constrain, current_layout
from dsjax.models.layers import GatedMLP, Init, Matrix, cut_axes
from dsjax.models.moe.dispatch import AXIS, mixture, plan
from dsjax.models.moe.experts import Network, Weights
from dsjax.models.moe.router import LOAD, Router, Routing, balance_loss, entropy, load_of, z_loss
from dsjax.models.spec import Tally
from dsjax.models.variables import LayerNumber


@dataclass(frozen=True)
class MixtureConfig:
    """A mixture's sizes and settings.

    Attributes:
      features, hidden: d and m.
      routing: how experts are chosen.
      layers: layers of the stack that it is in.
      balance: coefficient of `balance_loss`, of the mean over layers.
      z: likewise of `z_loss`.
      headroom: room of a round of dispatch, over the rows to a peer where all are spread evenly.
      shared: experts that every token goes to, as one network so many times as wide.
    """

    features: int
    hidden: int
    routing: Routing
    layers: int
    balance: float = 0.0
    z: float = 0.0
    headroom: float = 1.25
    shared: int = 0


def mixture_axes(path: str) -> dict[str, tuple[str | None, ...]]:
    """Logical names of the parameters of a stacked mixture at a path of the model."""
    return {
        f"{path}/router/kernel": ("layers", "embed", None),
        f"{path}/experts/gate_proj/kernel": ("layers", "expert", "embed", "mlp"),
        f"{path}/experts/up_proj/kernel": ("layers", "expert", "embed", "mlp"),
        f"{path}/experts/down_proj/kernel": ("layers", "expert", "mlp", "embed"),
    }


def mixture_extras(config: MixtureConfig) -> dict[str, Any]:
    """Shapes of what a mixture tells (see `Mixture`)."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    loads = jax.ShapeDtypeStruct((config.layers, config.routing.experts), jnp.float32)
    means = dict.fromkeys(("router_entropy", "router_balance", "dropped"), (number, number))
    return {**means, LOAD: Tally(loads, number)}  # type: ignore[arg-type]


class Experts(nnx.Module):
    """Gated feed-forward networks, [e, inputs, outputs] each of their matrices; rows go to them by `dispatch`.

    `dot_general`, if given, multiplies a block of rows by an expert's matrix in place of `jax.lax.dot_general`. It is
    not given one that keeps something from one product to the next (`momentary`).
    """

    momentary = True

    def __init__(self, config: MixtureConfig, *, init: Callable[[int, int], Init], rngs: nnx.Rngs):
        self.config = config
        self.dot_general: Any = None
        e, d, m = config.routing.experts, config.features, config.hidden
        self.gate_proj = Matrix((e, d), (m,), init=init(d, m), rngs=rngs)
        self.up_proj = Matrix((e, d), (m,), init=init(d, m), rngs=rngs)
        self.down_proj = Matrix((e, m), (d,), init=init(m, d), rngs=rngs)

    @property
    def dtype(self) -> Any:
        """The type in which all three multiply."""
        return self.gate_proj.dtype

    @dtype.setter
    def dtype(self, dtype: Any) -> None:
        for matrix in (self.gate_proj, self.up_proj, self.down_proj):
            matrix.dtype = dtype

    def __call__(self, x_bsd: jax.Array, gates_bsk: jax.Array, choices_bsk: jax.Array) -> jax.Array:
        """Sum over a token's choices of gate * expert(x), [b, s, d] in x's type.

        On a mesh the result is cut as what lies between layers (`residual`, `embed`).
        """
        kernels = [m.kernel[...] for m in (self.gate_proj, self.up_proj, self.down_proj)]
        dtype = self.dtype or kernels[0].dtype
        weights = Weights(*(kernel.astype(dtype) for kernel in kernels))
        config, routing, layout = self.config, self.config.routing, current_layout()
        cuts = _Cuts(x_bsd.shape)
        peers = layout.axis_size(AXIS) if layout is not None else 1
        net = Network(jax.nn.silu, self.dot_general)

        def local(x: jax.Array, gates: jax.Array, choices: jax.Array, weights: Weights) -> jax.Array:
            rows, length, d = x.shape
            most = routing.most(x_bsd.shape[1])
            how = plan(
                rows * length, routing.choices, routing.experts, peers, config.headroom, net,
                None if most is None else most * rows,
            )  # fmt: skip
            flat = (a.reshape(rows * length, -1) for a in (x.astype(dtype), gates, choices))
            return cuts.summed(mixture(*flat, weights, how).reshape(rows, length, d)).astype(x_bsd.dtype)

        if layout is None:
            return local(x_bsd, gates_bsk, choices_bsk, weights)
        tokens = P(cuts.batch, cuts.sequence, None)
        inwards, back = (layout.spec(names) for names in (("expert", None, "mlp"), ("expert", "mlp", None)))
        of_weights: Any = Weights(inwards, inwards, back)  # type: ignore[arg-type]
        mapped = layout.shard_map(local, (tokens, tokens, tokens, of_weights), cuts.result)
        return mapped(x_bsd, gates_bsk, choices_bsk, weights)


class _Cuts:
    """How tokens lie on the mesh, before the experts and after them."""

    def __init__(self, shape: tuple[int, ...]):
        layout = current_layout()
        names = ("batch", "sequence")
        self.batch, self.sequence = (
            cut_axes(layout, n, x) or None for n, x in zip(names, shape, strict=False)
        )
        self._columns = () if layout is None else layout.active("mlp")
        residual = () if layout is None else layout.fitting("residual", shape[1])
        self._along = tuple(axis for axis in residual if axis in self._columns)
        self._features = () if layout is None else layout.fitting("embed", shape[2])
        if layout is not None:
            after = (*(self.sequence or ()), *self._along) or None
            self.result = P(self.batch, after, self._features or None)

    def summed(self, y_bsd: jax.Array) -> jax.Array:
        """The sum over the devices that hold other columns of the experts, each with its part of it."""
        for dimension, axes in ((1, self._along), (2, self._features)):
            for axis in axes:
                y_bsd = lax.psum_scatter(y_bsd, axis, scatter_dimension=dimension, tiled=True)
        left = tuple(a for a in self._columns if a not in (*self._along, *self._features))
        return lax.psum(y_bsd, left) if left else y_bsd


class Mixture(nnx.Module):
    """Router and experts, what they add to the loss, and what is to be told of them.

    Evaluated (`deterministic`, as `nnx.Module.eval` sets it) it adds nothing to the loss.
    """

    def __init__(self, config: MixtureConfig, *, init: Callable[[int, int], Init], rngs: nnx.Rngs):
        routing = config.routing
        self.config, self.deterministic = config, False
        self.number = LayerNumber(jnp.zeros((), jnp.int32))
        self.router = Router(config.features, routing, init=init(config.features, routing.experts), rngs=rngs)
        self.experts = Experts(config, init=init, rngs=rngs)
        columns = config.shared * config.hidden
        self.shared = GatedMLP(config.features, columns, init=init, rngs=rngs) if columns else None

    def __call__(
        self, x_bsd: jax.Array, segment_ids_bs: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """([b, s, d], what is added to the sum of losses, extras).

        Args:
          x_bsd: not cut along s over `tensor`.
          segment_ids_bs: 0 is padding, which goes to no expert and counts nowhere.
        """
        config = self.config
        shape = x_bsd.shape[:2]
        counts = jnp.ones(shape) if segment_ids_bs is None else (segment_ids_bs > 0).astype(jnp.float32)
        routed = self.router(x_bsd, jnp.broadcast_to(counts, shape))
        y_bsd = self.experts(x_bsd, routed.gates, routed.choices)
        if self.shared is not None:
            y_bsd = y_bsd + constrain(self.shared(x_bsd), "batch", "residual", "embed")
        balance, z = balance_loss(routed, counts), z_loss(routed, counts)
        loss = (config.balance * balance + config.z * z) / config.layers
        loss = jnp.zeros(()) if self.deterministic else loss
        return y_bsd, loss, self._told(routed, counts, lax.stop_gradient(balance))

    def take_all(self) -> None:
        """No row is too many for an expert from now on: a sequence that is not whole yet has no even share."""
        routing = replace(self.config.routing, capacity=None)
        self.config = self.experts.config = replace(self.config, routing=routing)
        self.router.routing = routing

    def _told(self, routed: Any, counts_bs: jax.Array, balance: jax.Array) -> dict[str, Any]:
        routing = self.config.routing
        routed = jax.tree.map(lax.stop_gradient, routed)
        tokens = jnp.sum(counts_bs)
        rows = tokens * routing.choices
        load = jnp.sum(load_of(routed.wanted, routing.experts), axis=0)
        taken = jnp.sum(load_of(routed.choices, routing.experts)) if routing.capacity is not None else rows
        loads = jnp.zeros((self.config.layers, routing.experts)).at[self.number[...]].set(load)
        return {
            "router_entropy": (entropy(routed, counts_bs), tokens),
            "router_balance": (balance, tokens),
            "dropped": (rows - taken, rows),
            LOAD: Tally(loads, tokens),
        }
