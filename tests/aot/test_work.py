"""FLOPs and device memory traffic of instructions, against counts by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax import aot
from dsjax.aot.work import Work
from dsjax.mesh.turns import usually
from dsjax.models.moe.dispatch import mixture, plan
from dsjax.models.moe.experts import Network, Weights

MODULE = """HloModule jit_f, is_scheduled=true

%in_place (stack: f32[10,64], i: s32[], row: f32[64]) -> f32[10,64] {
  %stack = f32[10,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[64]{0} parameter(2)
  %zero = s32[] constant(0)
  %update = f32[1,64]{1,0} bitcast(%row)
  ROOT %set = f32[10,64]{1,0} dynamic-update-slice(%stack, %update, %i, %zero)
}

%take (stack.1: f32[10,64], i.1: s32[]) -> f32[64] {
  %stack.1 = f32[10,64]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %one = f32[1,64]{1,0} dynamic-slice(%stack.1, %i.1, %zero.1), dynamic_slice_sizes={1,64}
  ROOT %flat = f32[64]{0} bitcast(%one)
}

%yes (y: f32[64]) -> f32[64] {
  %y = f32[64]{0} parameter(0)
  ROOT %neg = f32[64]{0} negate(%y)
}

%no (n: f32[64]) -> f32[64] {
  ROOT %n = f32[64]{0} parameter(0)
}

ENTRY %main (p: f32[10,64], k: s32[], b: pred[]) -> f32[10,64] {
  %p = f32[10,64]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %b = pred[] parameter(2)
  LINE
}
"""


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        ("ROOT %r = f32[64]{0} fusion(%p, %k), kind=kLoop, calls=%take", 64 * 4 * 2 + 4),
        ("%g = f32[64]{0} fusion(%p, %k), kind=kLoop, calls=%take\n"
         "  ROOT %r = f32[10,64]{1,0} fusion(%p, %k, %g), kind=kLoop, calls=%in_place", 64 * 4 * 4 + 8),
        ("ROOT %r = f32[10,64]{1,0} add(%p, %p)", 10 * 64 * 4 * 3),
        ("ROOT %r = f32[640]{0} bitcast(%p)", 0),
        ("%g = f32[64]{0} fusion(%p, %k), kind=kLoop, calls=%take\n"
         "  ROOT %r = f32[64]{0} conditional(%b, %g, %g), true_computation=%yes, false_computation=%no",
         64 * 4 * 2 + 4 + 64 * 4 * 2),
    ],
)  # fmt: skip
def test_bytes_moved(line, moved):
    assert aot.inspect(MODULE.replace("LINE", line)).work == Work({}, moved)


@pytest.mark.parametrize(
    ("target", "config", "flops"),
    [
        ("__cublas$gemm", '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}}',
         2 * 64 * 64 * 10),
        ("__cublas$lt$matmul$f8", "{}", 2 * 64 * 64 * 64),
        ("something else", "{}", 0),
    ],
)  # fmt: skip
def test_flops_of_library_calls(target, config, flops):
    line = (
        f'ROOT %r = (f32[64,64]{{1,0}}, s8[512]{{0}}) custom-call(%p, %p), custom_call_target="{target}", '
        f"backend_config={config}"
    )
    inspection = aot.inspect(MODULE.replace("LINE", line))
    assert inspection.flops == flops
    assert len(inspection.dots) == (flops > 0)
    assert [c.target for c in inspection.custom_calls] == [target]


@pytest.mark.parametrize(
    ("equation", "shapes", "flops"),
    [
        ("ij,jk->ik", [(4, 5), (5, 6)], 2 * 4 * 5 * 6),
        ("bij,bjk->bik", [(3, 4, 5), (3, 5, 6)], 2 * 3 * 4 * 5 * 6),
        ("bshd,bthd->bhst", [(2, 8, 3, 16), (2, 7, 3, 16)], 2 * 2 * 3 * 8 * 7 * 16),
    ],
)
def test_flops_of_products(equation, shapes, flops):
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    compiled = jax.jit(lambda *xs: jnp.einsum(equation, *xs)).lower(*arrays).compile()
    assert aot.inspect(compiled).flops == flops


def test_work_of_a_loop_is_that_of_its_trips():
    weights = jnp.ones((7, 16, 16))
    compiled = (
        jax.jit(lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])
        .lower(jnp.ones((8, 16)), weights)
        .compile()
    )
    inspection = aot.inspect(compiled)
    assert inspection.flops == 7 * 2 * 8 * 16 * 16
    # A trip reads its own weights, not all of them.
    assert 7 * 16 * 16 * 4 < inspection.work.bytes < 7 * weights.nbytes


def test_work_adds_and_multiplies():
    total = (Work({"bf16": 2}, 3) + Work({"bf16": 1, "f32": 5}, 1)) * 2
    assert total == Work({"bf16": 6, "f32": 10}, 8)
    assert total.total_flops == 16


def test_a_loop_that_only_data_end_counts_as_often_as_it_says():
    def step(x, turns):
        with usually(7):
            return jax.lax.fori_loop(0, turns, lambda i, x: x @ x, x)

    compiled = jax.jit(step).lower(jnp.ones((16, 16)), jnp.int32(3)).compile()
    inspection = aot.inspect(compiled)
    assert [loop.trips for loop in inspection.loops] == [7] and inspection.flops == 7 * 2 * 16**3


def test_experts_count_as_if_each_had_as_many_rows():
    """Three products of each row's, and eight in the backward pass, which computes gate and up again."""
    tokens, choices, experts, d, m = 4096, 2, 8, 16, 32
    weights = Weights(jnp.ones((experts, d, m)), jnp.ones((experts, d, m)), jnp.ones((experts, m, d)))
    how = plan(tokens, choices, experts, 1, 1.25, Network(jax.nn.silu))

    def loss(x, gates, chosen, weights):
        return jnp.sum(mixture(x, gates, chosen, weights, how))

    args = (
        jnp.ones((tokens, d)),
        jnp.ones((tokens, choices)),
        jnp.zeros((tokens, choices), jnp.int32),
        weights,
    )
    one = 2 * tokens * choices * d * m
    for function, products in ((loss, 3), (jax.value_and_grad(loss, (0, 3)), 11)):
        assert aot.inspect(jax.jit(function).lower(*args).compile()).flops == products * one
