"""Candidates for fusing and their predicted gains, against cases worked by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from dsjax import aot
from dsjax.plan.cost import Reached
from dsjax.plan.explanation.fusion import FORMULA, LAUNCH, THRESHOLD, candidates
from dsjax.plan.explanation.jaxpr import walk

H100 = aot.load_chips()["H100"]
BF16, FP32, BYTES = 0.75 * 989.5e12, 0.75 * 67e12, 0.85 * 3352e9  # FLOP/s and bytes/s that are reached
MS = LAUNCH["gpu"]


def found(function, *shapes, dtype=jnp.bfloat16, chip=H100, **kwargs):
    """The candidates of a function of arrays of these shapes on one device."""
    arrays = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    return candidates(walk(jax.make_jaxpr(function)(*arrays), 1), chip, **kwargs)


def test_a_bias_and_a_relu_worked_by_hand():
    (one,) = found(lambda x, w, b: jax.nn.relu(x @ w + b), (4096, 512), (512, 1024), (1024,))
    flops, operands, result = 2 * 4096 * 512 * 1024, 2 * (4096 * 512 + 512 * 1024), 2 * 4096 * 1024
    bias = 2 * 1024
    product = max(flops / BF16, (operands + result) / BYTES) + MS
    chain = (
        max(2 * 4096 * 1024 / FP32, (result + bias + result) / BYTES) + MS
    )  # reads the result, writes as much
    fused = max(flops / BF16, (operands + bias + result) / BYTES) + MS
    assert one.apart_seconds == pytest.approx(product + chain) and one.fused_seconds == pytest.approx(fused)
    assert one.share == pytest.approx((product + chain - fused) / (product + chain))
    assert one.share == pytest.approx(0.503, abs=0.001) and one.share > THRESHOLD
    assert one.saved_bytes == 2 * result and one.recomputed_flops == 0
    assert one.followed_by == ("bias", "activation") and [o.primitive for o in one.chain] == ["add", "max"]


def test_a_large_product_gains_little_from_its_residual():
    (one,) = found(lambda x, w, r: x @ w + r, (8192, 14336), (14336, 4096), (8192, 4096))
    result = 2 * 8192 * 4096
    product = 2 * 8192 * 14336 * 4096 / BF16 + MS  # bound by arithmetic, which hides what the kernel moves
    assert one.gain_seconds == pytest.approx(3 * result / BYTES + MS)
    assert (
        one.share == pytest.approx(one.gain_seconds / (product + one.gain_seconds)) and one.share < THRESHOLD
    )
    assert one.followed_by == ("add",)


def test_what_others_need_is_written_all_the_same():
    def function(x, w):
        y = x @ w
        return jax.nn.relu(y), y

    (one,) = found(function, (4096, 512), (512, 1024))
    result, operands = 2 * 4096 * 1024, 2 * (4096 * 512 + 512 * 1024)
    assert one.saved_bytes == result  # it is not read again, but it is written
    assert one.fused_seconds == pytest.approx((operands + 2 * result) / BYTES + MS)


def test_shares_of_the_peaks_can_be_measured_ones():
    arguments = (lambda x, w: jax.nn.relu(x @ w), (4096, 512), (512, 1024))
    (default,), (slow,) = found(*arguments), found(*arguments, reached=Reached(products=0.1, memory=0.85))
    assert slow.fused_seconds > 2 * default.fused_seconds
    assert slow.gain_seconds == pytest.approx(2 * 2 * 4096 * 1024 / BYTES + MS)


def test_a_mask_is_made_in_the_kernel_rather_than_read():
    def function(q, k):
        scores = jnp.dot(q, k, preferred_element_type=jnp.float32)
        rows, columns = jnp.arange(2048)[:, None], jnp.arange(2048)[None]
        return jnp.where(rows >= columns, scores, -1e9)

    (one,) = found(function, (2048, 64), (64, 2048))
    assert one.followed_by == ("mask",) and one.recomputed_flops == 2048 * 2048  # one comparison an element
    moved = 2 * 2 * 2048 * 64 + 4 * 2048 * 2048  # operands and result; numbering rows takes no memory
    made = 2 * 2048 * 64 * 2048 / BF16 + 2048 * 2048 / FP32
    assert one.fused_seconds == pytest.approx(max(moved / BYTES, made) + MS)


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def conv(x, k, b):
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.nn.relu(jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dimensions) + b)


def quantised(x, w, s):
    return jnp.clip(jnp.round((x @ w) * s), -127, 127).astype(jnp.int8)


@pytest.mark.parametrize(
    ("function", "shapes", "names"),
    [
        (lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), ((64, 32), (32, 48), (32, 48)), ("activation", "gating")),
        (lambda x, w: jax.nn.gelu(x @ w), ((64, 32), (32, 48)), ("activation",)),
        (lambda x, w, r: norm(x @ w + r), ((64, 32), (32, 48), (64, 48)), ("add", "cast", "norm")),
        (lambda x, w: jnp.clip(x @ w, -1.0, 1.0), ((64, 32), (32, 48)), ("activation",)),
        (lambda x, w: jax.nn.softmax(x @ w), ((64, 32), (32, 48)), ("softmax",)),
        (quantised, ((64, 32), (32, 48), (48,)), ("scale", "rounding", "quantisation")),
        (lambda x, w: (x @ w).astype(jnp.float8_e4m3fn), ((64, 32), (32, 48)), ("quantisation",)),
        (lambda x, w, s: (x @ w) - s[:, None], ((64, 32), (32, 48), (64,)), ("shift",)),
        (conv, ((2, 8, 8, 4), (3, 3, 4, 8), (8,)), ("bias", "activation")),
        (
            lambda x, w, b: jax.lax.ragged_dot(x, w, jnp.array([30, 34])) + b,
            ((64, 32), (2, 32, 48), (48,)),
            ("bias",),
        ),
    ],
)  # fmt: skip
def test_chains_have_the_names_of_the_trade(function, shapes, names):
    assert [c.followed_by for c in found(function, *shapes)] == [names]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w, v: x @ w @ v, ((64, 32), (32, 48), (48, 8))),
        (lambda x, w: (x @ w).reshape(8, 8, 48).transpose(1, 0, 2), ((64, 32), (32, 48))),
        (lambda x, w: (x @ w).astype(jnp.float32)[:8].sum(), ((64, 32), (32, 48))),  # the reader casts
        (lambda x, w: jnp.sort(x @ w), ((64, 32), (32, 48))),
    ],
)
def test_no_candidate_where_nothing_elementwise_follows(function, shapes):
    assert found(function, *shapes) == []


def test_a_chain_does_not_wait_for_what_follows_from_it_elsewhere():
    def function(x, w, v):
        y = x @ w
        return jnp.sin(y) + jnp.sin(y) @ v, y

    (first,) = found(function, (64, 32), (32, 48), (48, 48))[:1]
    assert [o.primitive for o in first.chain] == ["sin", "sin"]  # not the sum, which needs the second product

    def looped(x, w):
        y = x @ w
        late = jax.lax.fori_loop(0, 3, lambda _, z: jnp.sin(z), y)
        return jnp.cos(y) * late

    (one,) = found(looped, (64, 32), (32, 48))
    assert [o.primitive for o in one.chain] == ["cos"]


def test_a_reduction_ends_its_chain_and_an_operation_has_one_product():
    (one,) = found(lambda x, w: norm(x @ w), (64, 32), (32, 48))
    assert [o.primitive for o in one.chain] == ["convert_element_type", "mul", "reduce_sum"]
    first, *rest = found(lambda x, w, v: (x @ w) * (x @ v), (64, 32), (32, 48), (32, 48))
    assert first.followed_by == ("gating",) and rest == []


def test_the_formula_is_told_and_the_passes_do_not_mix():
    assert all(word in FORMULA for word in ("launch", "bandwidth", "recomputed", "upper bound"))

    def loss(w, x, v):
        return jnp.sum(jax.checkpoint(lambda x: jax.nn.silu(x @ w))(x) @ v)

    step = walk(jax.make_jaxpr(jax.grad(loss))(*(jnp.zeros(s) for s in ((32, 48), (64, 32), (48, 8)))), 1)
    for candidate in candidates(step, H100):
        assert {o.phase for o in candidate.chain} == {candidate.product.phase}
    assert {c.product.phase for c in candidates(step, H100)} >= {"forward", "recomputed"}
