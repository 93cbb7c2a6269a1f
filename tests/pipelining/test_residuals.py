"""What a layer keeps for its backward pass: activations alone, and enough of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dsjax.pipelining.residuals import LayerVjp

ROWS, WIDTH, HIDDEN = 5, 8, 12
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def weights():
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(up, (WIDTH, HIDDEN)) / 3,
        "down": jax.random.normal(down, (HIDDEN, WIDTH)) / 3,
        "scale": jnp.linspace(0.5, 1.5, WIDTH),
    }


def layer(own, state, x, m):
    """Norm, product, dropout, product in bfloat16; a loss and an extra of its own."""
    half = jnp.bfloat16
    normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * own["scale"]
    h = jnp.tanh(normed.astype(half) @ own["up"].astype(half))
    mask = jax.random.bernoulli(jax.random.fold_in(state["key"], m), 0.8, h.shape)
    h = jnp.where(mask, h / 0.8, 0)
    y = x + (h @ own["down"].astype(half)).astype(jnp.float32)
    return (y, 1e-2 * jnp.sum(y**2)), {"size": (jnp.sum(jnp.abs(y)), jnp.float32(y.size))}


def exact(own, state, x, m):
    """The same in fp32, for comparisons to the last digits."""
    h = jnp.tanh((x * own["scale"]) @ own["up"])
    mask = jax.random.bernoulli(jax.random.fold_in(state["key"], m), 0.8, h.shape)
    y = x + jnp.where(mask, h, 0) @ own["down"]
    return (y, 1e-2 * jnp.sum(y**2)), {}


def remade(function):
    return jax.checkpoint(function, prevent_cse=False)


def arguments():
    return (
        weights(),
        {"key": jax.random.key(1)},
        jax.random.normal(jax.random.key(2), (ROWS, WIDTH)),
        jnp.int32(3),
    )


def gradient():
    return jax.random.normal(jax.random.key(4), (ROWS, WIDTH)), jnp.float32(0.7)


def wanted(function):
    own, state, x, m = arguments()
    _, pull, _ = jax.vjp(lambda own, x: function(own, state, x, m), own, x, has_aux=True)
    return pull(gradient())


def shapes(kept):
    return [(leaf.shape, leaf.dtype.name) for leaf in kept]


def test_neither_a_weight_nor_its_cast_nor_a_mask_is_kept():
    vjp = LayerVjp(layer, *arguments()[:3], NUMBER)
    assert vjp.kept
    for shape, dtype in shapes(vjp.kept):
        assert shape in {(ROWS, WIDTH), (ROWS, HIDDEN), (ROWS, 1)}, f"{dtype}{shape} is no activation"
        assert dtype != "bool", "a mask is kept"
    # The product's input; its output after tanh, one minus that, and after dropout: all that the backward reads.
    assert shapes(vjp.kept).count(((ROWS, WIDTH), "bfloat16")) == 1
    # (one of them derived from another with some versions of jax)
    assert shapes(vjp.kept).count(((ROWS, HIDDEN), "bfloat16")) in (2, 3)


@jax.jit
def dense(x, w):
    return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))


def jitted(own, state, x, m):
    return (x + dense(x, own["up"]) @ own["down"], jnp.zeros(())), {}


def test_a_weight_inside_a_jitted_function_is_not_kept_nor_its_gradient_handed_on():
    own, state, x, _ = arguments()
    vjp = LayerVjp(jitted, own, state, x, NUMBER)
    assert {shape for shape, _ in shapes(vjp.kept)} == {(ROWS, WIDTH), (ROWS, HIDDEN)}
    crossing = vjp.split(own, state, NUMBER, (x, jnp.float32(0)))
    assert {shape for shape, _ in shapes(crossing)} == {(ROWS, WIDTH), (ROWS, HIDDEN)}


def test_a_gathered_weight_is_not_kept():
    seen = []

    def gathering(own, state, x, m):
        whole = jax.lax.all_gather(own["up"], "fsdp", axis=0, tiled=True)
        assert whole.shape == (WIDTH, HIDDEN)
        return exact({**own, "up": whole}, state, x, m)

    def body(own, state, x):
        vjp = LayerVjp(gathering, own, state, x, NUMBER)
        seen.append(shapes(vjp.kept))
        kept = vjp.forward(own, state, x, jnp.int32(3))[2]
        return vjp.backward(own, state, jnp.int32(3), kept, gradient())

    own, state, x, _ = arguments()
    specs = {name: P("fsdp") if name == "up" else P() for name in own}
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(specs, P(), P()), out_specs=(specs, P()), check_vma=False
    )
    got, dx = jax.jit(mapped)(own, state, x)
    assert all(shape[0] == ROWS for shape, _ in seen[0])
    want, want_dx = wanted(exact)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        got["up"], 2 * want["up"], rtol=1e-5, atol=1e-6
    )  # summed over two equal devices


@pytest.mark.parametrize("function", [layer, exact], ids=["bfloat16", "float32"])
def test_recomputed_in_full_the_input_alone_is_kept(function):
    own, state, x, m = arguments()
    vjp = LayerVjp(remade(function), own, state, x, NUMBER)
    assert shapes(vjp.kept) == [((ROWS, WIDTH), "float32")]
    _, _, kept = vjp.forward(own, state, x, m)
    np.testing.assert_array_equal(kept[0], x)


def test_recomputed_but_for_products_the_products_are_kept():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    vjp = LayerVjp(jax.checkpoint(exact, policy=policy, prevent_cse=False), *arguments()[:3], NUMBER)
    # The input, and the results of both products: the second is what the loss is of.
    assert sorted(shape for shape, _ in shapes(vjp.kept)) == [(ROWS, WIDTH), (ROWS, WIDTH), (ROWS, HIDDEN)]


@pytest.mark.parametrize("function", [layer, exact, remade(exact)], ids=["bfloat16", "float32", "recomputed"])
def test_forward_and_backward_are_those_of_the_layer(function):
    own, state, x, m = arguments()
    vjp = LayerVjp(function, own, state, x, NUMBER)
    (y, loss), extras, kept = jax.jit(vjp.forward)(own, state, x, m)
    (want_y, want_loss), want_extras = function(own, state, x, m)
    tolerance = 2e-2 if function is layer else 1e-5
    np.testing.assert_allclose(y, want_y, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(loss, want_loss, rtol=tolerance)
    assert extras.keys() == want_extras.keys() and shapes(kept) == shapes(vjp.kept)
    # What is kept alone, without x, must be enough.
    got = jax.jit(vjp.backward)(own, state, m, kept, gradient())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted(function)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(jnp.max(jnp.abs(b))))


def test_the_mask_of_the_backward_is_that_of_the_microbatch():
    own, state, x, m = arguments()
    vjp = LayerVjp(exact, own, state, x, NUMBER)
    kept = vjp.forward(own, state, x, m)[2]
    right, other = (vjp.backward(own, state, jnp.int32(n), kept, gradient())[1] for n in (3, 4))
    np.testing.assert_allclose(right, wanted(exact)[1], rtol=1e-5, atol=1e-6)
    assert float(jnp.max(jnp.abs(right - other))) > 1e-2


def test_the_two_halves_are_the_whole():
    own, state, x, m = arguments()
    vjp = LayerVjp(exact, own, state, x, NUMBER)
    crossing = vjp.split(own, state, NUMBER, (x, jnp.float32(0)))
    kept = vjp.forward(own, state, x, m)[2]
    left, dx = jax.jit(vjp.backward_input)(own, state, m, kept, gradient())
    assert shapes(left) == shapes(crossing)
    assert {shape for shape, _ in shapes(left)} <= {(ROWS, WIDTH), (ROWS, HIDDEN)}, "a weight crosses"
    dw = jax.jit(vjp.backward_weight)(own, state, m, kept, left)
    want_dw, want_dx = wanted(exact)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-6)
    for name, value in want_dw.items():
        np.testing.assert_allclose(dw[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_first_half_multiplies_for_the_input_alone():
    own, state, x, m = arguments()
    vjp = LayerVjp(exact, own, state, x, NUMBER)
    vjp.split(own, state, NUMBER, (x, jnp.float32(0)))
    kept = vjp.forward(own, state, x, m)[2]
    left, _ = vjp.backward_input(own, state, m, kept, gradient())

    def products(function, *arguments):
        return jax.jit(function).lower(*arguments).compile().as_text().count(" dot(")

    whole = products(vjp.backward, own, state, m, kept, gradient())
    first = products(vjp.backward_input, own, state, m, kept, gradient())
    second = products(vjp.backward_weight, own, state, m, kept, left)
    assert (whole, first, second) == (4, 2, 2)
