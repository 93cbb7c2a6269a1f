"""Training with a codec gives what a reference on one device makes of the same replicas' gradients, on any layout."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dsjax.config.exchange import GradSyncConfig
from dsjax.grad_sync import Exchange
from dsjax.grad_sync.exchange import residual_spec
from dsjax.grad_sync.residuals import shapes
from dsjax.mesh import named_leaves
from dsjax.mesh.inside import left_spec, only

sys.path.insert(0, str(Path(__file__).parent.parent))
import oracle
from reference import exchanged, local_parts

_PAIRS = {"topology": {"node": {"devices": 2}}, "route": "hierarchical"}
_SMALL = {"min_size": 1, "dense": ["embed/*"]}
CODECS: dict[str, Mapping[str, Any]] = {
    "int8": {"codec": "int8"}, "int4": {"codec": "int4"}, "e2m4": {"codec": "e2m4", "feedback_decay": 0.5},
    "rotated": {"codec": "int4", "hadamard": True, "block": 64}, "bf16": {"dense_dtype": "bfloat16"},
    "topk": {"codec": "topk"}, "topk_int4": {"codec": "topk_int4", "fraction": 0.01},
    "open": {"codec": "int4", "error_feedback": False},
}  # fmt: skip


LOOKED_AT = ("layers/attention/k_proj/kernel", "layers/mlp/down_proj/kernel", "head/kernel")
"""Cut along one dimension or the other, and one outside of the stack."""


class Recording(Exchange):
    """An exchange that also keeps what each replica gave, among its residuals."""

    @property
    def keeps(self) -> tuple[str, ...]:
        return (*super().keeps, "given")

    def kept(self, name: str, tensor: Any) -> list[int]:
        return list(tensor.numbers) if name == "given" else super().kept(name, tensor)

    def __call__(self, layout: Any, grads: Any, residuals: Any, seed: Any) -> Any:
        # Once computed: two uses could otherwise be two computations, an ulp apart.
        grads = jax.lax.optimization_barrier(grads)
        named = {p: g for p, g in named_leaves(grads).items() if p in residuals["given"]}
        specs = {path: left_spec(layout, path) for path in named}
        out = {p: only(residual_spec(self.tensors[p]), lambda a: a not in layout.local) for p in named}
        flat = layout.shard_map(
            lambda grads: {p: g.reshape(*(1,) * (1 + len(self.tensors[p].axes)), -1) for p, g in grads.items()},
            (specs,), out,
        )(named)  # fmt: skip
        rest = {name: part for name, part in residuals.items() if name != "given"}
        sums, new = super().__call__(layout, grads, rest, seed)
        return sums, {**new, "given": flat}


def _program(case: Mapping[str, Any], codec: Mapping[str, Any]) -> Any:
    program = oracle.program_of({**oracle.PLAIN, **case})
    settings = GradSyncConfig(**{**_SMALL, **codec})
    program = replace(program, grad_sync=settings)
    exchange = program.parts.exchange
    recording = Recording(**{f: getattr(exchange, f) for f in Exchange.__dataclass_fields__})
    program.parts = replace(program.parts, exchange=recording)
    program.abstract_state = _with_recording(program, recording)
    program.state_shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state)
    return program


def _with_recording(program: Any, exchange: Exchange) -> Any:
    def place(path: str, leaf: Any) -> Any:
        sharding = jax.sharding.NamedSharding(program.mesh, residual_spec(exchange.tensors[path]))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    kept = {name: {p: place(p, s) for p, s in part.items()} for name, part in shapes(exchange).items()}
    return replace(program.abstract_state, residuals=kept)


CASES = [
    ({"data": 2}, {}),
    ({"data": 4, "fsdp": 2, "gradient_accumulation_steps": 2}, _PAIRS),
    ({"data": 2, "fsdp": 2, "tensor": 2}, {"overlap": True, "bucket_bytes": 9000}),
    ({"data": 2, "context": 2, "tensor": 2, "rows": "ragged"}, {}),
    ({"data": 2, "pipeline": (2, "1f1b"), "tensor": 2}, {}),
    ({"data": 4, "pipeline": (2, "interleaved")}, _PAIRS),
    ({"data": 8, "gradient_accumulation_steps": 2}, {**_PAIRS, "overlap": True, "bucket_bytes": 30_000}),
    ({"data": 8}, {"topology": {"node": {"devices": 2}, "rack": {"devices": 4}}, "route": "tree"}),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_codec_gives_what_its_reference_gives(number: int) -> None:
    # Each layout with one codec, each codec on one layout; every pair of them below.
    case, settings = CASES[number]
    _check(case, {**settings, **CODECS[list(CODECS)[number]]})


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_codec_on_every_layout(number: int, name: str) -> None:
    case, settings = CASES[number]
    _check(case, {**settings, **CODECS[name]})


def _check(case: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    program = _program(case, settings)
    exchange = program.parts.exchange
    state = program.init(seed=3)
    for step in range(2):
        batch = program.place(oracle.batch_of(case.get("rows", "full"), step))
        old = jax.device_get(state.residuals)
        state, _ = program.step(batch)(state, batch, program.votes())
        new = jax.device_get(state.residuals)
        got = {n: np.asarray(v) for n, v in named_leaves(jax.device_get(state.opt_state[0].trace)).items()}
        clip = _clipped(got)
        for path in LOOKED_AT:
            assert exchange.tensors[path].coded
            _compare(exchange, path, old, new, got[path] / clip)


def _clipped(grads: Mapping[str, np.ndarray]) -> float:
    """Gradients of these small models are shorter than the limit at which they are clipped."""
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values()))
    assert norm < 0.999, norm
    return 1.0


def _compare(exchange: Exchange, path: str, old: Any, new: Any, got: np.ndarray) -> None:
    tensor = exchange.tensors[path]
    parts = local_parts(tensor, got)
    for place in {min(parts), max(parts)}:
        part = parts[place]
        row = start = 0
        for window, rows in enumerate(tensor.windows):
            numbers = tensor.numbers[window]
            given = [
                new["given"][path][(r, *place)][start : start + numbers]
                for r in range(exchange.route.replicas)
            ]
            start += numbers
            before, after = (
                {n: _window(exchange, s[n][path], n, path, place, window) for n in exchange.keeps[:-1]}
                for s in (old, new)
            )
            want, kept = exchanged(exchange, tensor, given, before, rows, 0)
            np.testing.assert_allclose(
                part[row : row + rows].reshape(-1), want, rtol=1e-6, atol=1e-9, err_msg=path
            )
            for name, residual in kept.items():
                np.testing.assert_allclose(
                    after[name], residual, rtol=1e-6, atol=1e-9, err_msg=f"{name} {path}"
                )
            row += rows


def _window(
    exchange: Exchange, array: np.ndarray, name: str, path: str, place: Any, window: int
) -> np.ndarray:
    sizes = exchange.kept(name, exchange.tensors[path])
    start = sum(sizes[:window])
    return array[(slice(None), *place, slice(start, start + sizes[window]))]
