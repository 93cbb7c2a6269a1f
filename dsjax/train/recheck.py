"""The gradient of a microbatch computed twice and compared bit by bit: a device that computes wrong now and then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.backend.compiling import compiled_around
from dsjax.errors import ConfigError
from dsjax.faults import VARIABLE
from dsjax.grad_sync import AXIS
from dsjax.mesh import gather_all, use_layout
from dsjax.mesh.inside import inside, manual_specs, shard_map_over
from dsjax.stability.replicas import checksum
from dsjax.train.gradients import Microbatches, StepParts, at_rest, of_microbatch, positions_of
from dsjax.train.host_batch import abstract
from dsjax.train.program import Program
from dsjax.train.replicas import each_its_own_spec
from dsjax.train.state import State
from dsjax.train.step import loss_seed

# Additions of scattered numbers (the gradient of an embedding) come in any order otherwise.
_SAME_TWICE = {"gpu": {"xla_gpu_exclude_nondeterministic_ops": True}}


def refuse_stages(every: int, stages: int) -> None:
    """Refuses the check where there are stages.

    Raises:
      ConfigError: naming both settings.
    """
    if every and stages > 1:
        raise ConfigError(
            "stability.check_recompute_every: a pipeline computes no microbatch by itself; set mesh.pipeline=1 or "
            "stability.check_recompute_every=0 (stability.check_replicas_every goes with a pipeline)"
        )


class Recomputed:
    """Computes the gradient of a batch's first microbatch twice, by one compiled program.

    Args:
      batch: placed or abstract.
    """

    def __init__(self, program: Program, batch: Any):
        mesh = program.mesh
        platform = {"cuda": "gpu"}.get(kind := mesh.devices.flat[0].platform, kind)
        function = jax.jit(
            lambda state, batch, struck: _checksums(program.parts, state, batch, struck),
            out_shardings=program.replicated,
        )
        struck = jax.ShapeDtypeStruct((), jnp.int32, sharding=program.replicated)
        options = {**program.compiler_options, **_SAME_TWICE.get(platform, {})}
        lowered = function.lower(program.abstract_state, abstract(batch), struck)
        self._sums, self._replicated = compiled_around(lowered.compile, options)[0], program.replicated
        self._ids = [device.id for device in mesh.devices.flat]

    def differing(self, state: State, batch: Any, struck: int | None = None) -> list[int]:
        """Ids of the devices whose part of the gradient is not the same twice.

        Args:
          struck: id of a device that is to compute wrong the second time.
        """
        if struck is not None and struck not in self._ids:
            raise ConfigError(
                f"{VARIABLE}: there is no device {struck}; there are {', '.join(map(str, self._ids))}"
            )
        at = -1 if struck is None else self._ids.index(struck)
        first, second = (
            np.asarray(self._sums(state, batch, jax.device_put(np.int32(which), self._replicated)))
            for which in (-1, at)
        )
        odd = np.any(first != second, axis=1)
        return [device for device, differs in zip(self._ids, odd, strict=True) if differs]


def _checksums(parts: StepParts, state: State, batch: Any, struck: jax.Array) -> jax.Array:
    """uint32 [devices, arrays]: of each device's part of its own replica's gradient, before any exchange."""
    layout = parts.layout
    replicas = layout.axis_size(AXIS)
    # One replica computes as the step does, outside of any shard_map.
    local = inside(layout, (AXIS,), state.params, state.model_state) if replicas > 1 else layout

    def gradient(params: Any, model_state: Any, batch: Any, positions: Any, now: Any) -> Any:
        replica = lax.axis_index(AXIS) if replicas > 1 else 0
        given = Microbatches(batch, positions, now[0], lambda i: i * replicas + replica, now[1])
        with use_layout(local):
            params = gather_all(params) if local.fsdp_gather == "step" else params
            sums, _ = of_microbatch(replace(parts, layout=local), params, model_state, given, 0)
            return jax.tree.map(lambda g: g[None], at_rest(local, sums.grads))

    axes = tuple(layout.mesh.axis_names)
    mapped: Any = gradient
    if replicas > 1:
        own, others = (manual_specs(local, tree) for tree in (state.params, state.model_state))
        rows = P(None, AXIS)
        mapped = shard_map_over(local, gradient, (own, others, rows, rows, P()), each_its_own_spec(own))
    now = state.step, loss_seed(state, batch)
    grads = mapped(state.params, state.model_state, batch, positions_of(batch), now)

    def sums(grads: Any, struck: jax.Array) -> jax.Array:
        first, *rest = jax.tree.leaves(grads)
        first = first + (lax.axis_index(axes) == struck).astype(first.dtype)
        return jnp.stack([checksum(leaf) for leaf in (first, *rest)])[None]

    places = each_its_own_spec(jax.tree.map(lambda p: p.spec, layout.param_shardings(state.params)))
    return jax.shard_map(
        sums, mesh=layout.mesh, in_specs=(places, P()), out_specs=P(axes), check_vma=False
    )(grads, struck)  # fmt: skip
