"""The walk over a jaxpr, against counts by hand and against the compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plan_runs import MODEL

from dsjax import aot
from dsjax.config import from_dict
from dsjax.mesh import make_mesh
from dsjax.plan.compiled import describe
from dsjax.plan.explanation.explain import _take_apart
from dsjax.plan.explanation.jaxpr import TAG, walk
from dsjax.plan.explanation.operations import Array, bytes_of, short
from dsjax.plan.explanation.places import collapsed, layer_of
from dsjax.plan.explanation.tallies import layer_types


def walked(function, *shapes, devices=1, names=()):
    """A function of fp32 arrays of these shapes, walked."""
    arrays = [jnp.zeros(s, jnp.float32) if isinstance(s, tuple) else s for s in shapes]
    return walk(jax.make_jaxpr(function)(*arrays), devices, names)


def only(step, kind):
    (found,) = [o for o in step.operations if o.kind == kind]
    return found


def test_an_exact_product_of_fp32_asks_for_another_unit():
    units = {None: "f32", "high": "f32", "highest": "fp32"}
    for precision, unit in units.items():
        step = walked(lambda x, w, p=precision: jnp.dot(x, w, precision=p), (4, 8), (8, 16))
        assert only(step, "matmul").unit == unit
        assert only(step, "matmul").dtype == "f32"


def test_a_product_a_bias_and_a_relu_by_hand():
    step = walked(lambda x, w, b: jax.nn.relu(x @ w + b), (4, 8), (8, 16), (16,))
    product = only(step, "matmul")
    assert product.flops == 2 * 4 * 8 * 16
    assert (product.read, product.written) == (4 * (4 * 8 + 8 * 16), 4 * 4 * 16)
    add = next(o for o in step.operations if o.primitive == "add")
    assert (add.flops, add.read, add.written) == (64, 4 * (64 + 16), 4 * 64)
    relu = next(o for o in step.operations if o.primitive == "max")
    assert (relu.flops, relu.read, relu.written) == (64, 4 * 64, 4 * 64)
    assert sum(o.bytes for o in step.operations) == 4 * (32 + 128 + 64) + 4 * (80 + 64) + 4 * 128


def test_loops_multiply_and_the_longest_branch_counts():
    def body(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x @ w), lambda x: jnp.sin(x), x), x.sum()

    step = walked(lambda x, w: jax.lax.scan(body, x, w), (4, 4), (3, 4, 4))
    product = only(step, "matmul")
    assert product.times == 3 and step.product_flops == 3 * 2 * 4 * 4 * 4
    assert [o.times for o in step.operations if o.primitive == "sin"] == [3]  # of one branch
    assert [o.times for o in step.operations if o.primitive == "reduce_sum"] == [3]

    nested = walked(
        lambda x, w: jax.lax.scan(lambda x, w: (jax.lax.scan(body, x, w)[0], 0), x, w), (4, 4), (5, 3, 4, 4)
    )
    assert only(nested, "matmul").times == 15
    counted = walked(lambda x: jax.lax.fori_loop(2, 7, lambda i, x: x @ x, x), (4, 4))
    assert counted.unknown_loops == 0 and only(counted, "matmul").times == 5
    hidden = walked(
        lambda x: jax.lax.fori_loop(jax.lax.optimization_barrier(0), 3, lambda i, x: x @ x, x), (4, 4)
    )
    assert hidden.unknown_loops == 0 and only(hidden, "matmul").times == 3
    counted = walked(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x), (4, 4))
    assert counted.unknown_loops == 1 and only(counted, "matmul").times == 1


def test_passes_are_told_apart_and_recomputation_is_counted():
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    step = walked(jax.grad(lambda w, x: jnp.sum(layer(layer(x, w), w) ** 2), 0), (4, 4), (2, 4))
    phases = [o.phase for o in step.operations if o.kind == "matmul"]
    assert phases.count("forward") == 2 and phases.count("recomputed") == 2
    assert phases.count("backward") == 3  # two for the weight, one for the first layer's output
    plain = walked(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), 0), (4, 4), (2, 4))
    assert "recomputed" not in {o.phase for o in plain.operations}


def test_custom_derivatives_and_nested_jit_are_entered():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    assert only(walked(jax.jit(product), (2, 4), (4, 8)), "matmul").flops == 2 * 2 * 4 * 8
    step = walked(jax.grad(lambda w, x: jnp.sum(jax.jit(product)(x, w)), 0), (4, 8), (2, 4))
    assert [o.flops for o in step.operations if o.kind == "matmul"] == [128.0] * 3


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), ((3, 4, 5), (3, 5, 6)), 2 * 3 * 4 * 5 * 6),
        (lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([3, 5])), ((8, 4), (2, 4, 5)), 2 * 8 * 4 * 5),
        (
            jax.grad(lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([3, 5])).sum(), 1),
            ((8, 4), (2, 4, 5)),
            2 * 2 * 8 * 4 * 5,  # forward, and the gradient of the matrices
        ),
        (
            lambda x, k: jax.lax.conv_general_dilated(
                x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            ((2, 8, 8, 3), (3, 3, 3, 16)),
            2 * (2 * 4 * 4 * 16) * 3 * 3 * 3,
        ),
        (
            lambda x, k: jax.lax.conv_general_dilated(
                x, k, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=4
            ),
            ((1, 10, 8), (3, 2, 16)),
            2 * (8 * 16) * 3 * 2,
        ),
    ],
)
def test_flops_of_products_by_hand(function, shapes, flops):
    assert walked(function, *shapes).product_flops == flops


def test_inside_a_shard_map_shapes_are_of_one_device():
    mesh = make_mesh({"data": 2, "fsdp": 4}, jax.devices()[:8])
    local = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(P(("data", "fsdp")), P()), out_specs=P(("data", "fsdp")),
        check_vma=False,
    )  # fmt: skip
    step = walked(lambda x, w: local(x, w) @ w, (16, 4), (4, 4), devices=8)
    inside, outside = [o for o in step.operations if o.kind == "matmul"]
    assert inside.operands[0].shape == (2, 4) and inside.flops == 2 * 2 * 4 * 4 == outside.flops
    # The whole matrix is on every device there; outside nothing is known of it but that there are eight devices.
    assert (inside.read, outside.read) == (4 * (8 + 16), 4 * (64 + 16) / 8)


def test_shares_follow_arguments_casts_and_pinned_shardings():
    mesh = make_mesh({"fsdp": 8}, jax.devices()[:8])
    whole = NamedSharding(mesh, P())

    def function(x, w):
        return x @ jax.lax.with_sharding_constraint(w.astype(jnp.bfloat16), whole)

    step = walk(
        jax.make_jaxpr(function)(jnp.zeros((16, 4), jnp.bfloat16), jnp.zeros((4, 8))), 8, (), (1 / 8, 1 / 8)
    )
    cast, product = only(step, "cast"), only(step, "matmul")
    assert (cast.read, cast.written) == (4 * 4 * 8 / 8, 2 * 4 * 8 / 8)
    assert product.read == 2 * 16 * 4 / 8 + 2 * 4 * 8 and product.flops == 2 * 16 * 4 * 8 / 8


def test_parts_of_arrays_count_as_parts_and_narrow_types_are_packed():
    assert bytes_of("indexing", "dynamic_slice", (4000.0, 4.0), (40.0,)) == (44.0, 40.0)
    assert bytes_of("indexing", "dynamic_update_slice", (4000.0, 40.0, 4.0), (4000.0,)) == (40.0, 40.0)
    assert bytes_of("indexing", "scatter-add", (4000.0, 8.0, 40.0), (4000.0,)) == (88.0, 40.0)
    assert bytes_of("free", "reshape", (4000.0,), (4000.0,)) == (0.0, 0.0)
    assert Array("s4", (3, 5)).bytes == 7.5 and Array("f8e4m3fn", (3,)).bytes == 3
    assert [short(np.dtype(d)) for d in ("float32", "int8", "uint32", "bool")] == ["f32", "s8", "u32", "pred"]
    assert short(jnp.dtype("bfloat16")) == "bf16" and short(jnp.dtype("float8_e4m3fn")) == "f8e4m3fn"


def test_layers_are_named_by_scope_then_parameter_then_function():
    params = {"params": {"mlp": {"up": {"kernel": jnp.zeros((4, 4))}}, "out": {"kernel": jnp.zeros((4, 2))}}}

    def helper(x):
        return jnp.sin(x)

    def loss(params, x):
        with jax.named_scope("block"):
            x = x @ params["params"]["mlp"]["up"]["kernel"]
        return jnp.sum(helper(x) @ params["params"]["out"]["kernel"].astype(jnp.float32))

    names = ["0/params/mlp/up/kernel", "0/params/out/kernel", "1"]
    step = walk(jax.make_jaxpr(jax.grad(loss))(params, jnp.zeros((2, 4))), 1, names)
    paths = {(o.path, o.phase) for o in step.operations if o.kind == "matmul"}
    # The gradient of a matrix has no parameter among its operands, but comes from the same line.
    assert paths == {("block", "forward"), ("block", "backward"), ("out", "forward"), ("out", "backward")}
    (sine,) = [o for o in step.operations if o.primitive == "sin"]
    assert sine.path.endswith("helper()")
    assert [layer_of(n) for n in ("0/params/a/kernel/value", "0/w", "1/a/b/kernel", "2")] == [
        "a",
        "w",
        "a/b",
        "argument 2",
    ]
    assert (
        collapsed("layers/3/mlp/block_12") == "layers/*/mlp/block_*" and collapsed("conv2d/w1") == "conv2d/w1"
    )


def test_types_are_of_inputs_weights_accumulators_and_outputs():
    def loss(params, x):
        for layer in params["params"]:
            x = jnp.dot(x, layer.astype(jnp.bfloat16), preferred_element_type=jnp.float32).astype(
                jnp.bfloat16
            )
        return jnp.sum(x.astype(jnp.float32))

    params = {"params": [jnp.zeros((4, 4))] * 3}
    names = [f"0/params/{i}/kernel" for i in range(3)]
    step = walk(jax.make_jaxpr(jax.grad(loss))(params, jnp.zeros((2, 4), jnp.bfloat16)), 1, names)
    (layer,) = layer_types(step)  # three like layers stand once
    assert (layer.path, layer.operations) == ("*", 3)
    assert (layer.inputs, layer.weights) == (("bf16",), ("f32 as bf16",))
    assert (layer.accumulators, layer.outputs) == (("f32",), ("f32",)) and layer.gradients == ("f32 to f32",)


def run_on(mesh, **train):
    """A small run, taken apart and compiled with its operations' numbers for simulated devices."""
    target = aot.parse_target("cpu:8")
    config = from_dict({
        "model": {**MODEL, "vocab_size": 256}, "mesh": mesh, "optimizer": {"kind": "sgd"},
        "train": {"steps": 10, "global_batch_size": 16, "sequence_length": 64, "remat": "full", **train},
    })  # fmt: skip
    described = describe(config, target, None)
    traced, step = _take_apart(described.program, described.batch, target)
    lowered = aot.lower_for(target, traced.rejitted(step.tagged), *traced.leaves)
    compiled = aot.compile_for(target, lowered)
    return described, step, compiled, aot.inspect(compiled, described.program.mesh)


@pytest.fixture(scope="module")
def accumulated():
    return run_on({"data": 2, "fsdp": 2, "tensor": 2}, gradient_accumulation_steps=2)


def test_the_products_of_a_step_are_those_of_the_compiled_one(accumulated):
    check_products(*accumulated)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "train"),
    [
        ({"context": 2, "fsdp": 4}, {"remat": "every_2"}),
        ({"fsdp": 8}, {"remat": "none"}),
        ({"fsdp": 8}, {"remat": "dots"}),
    ],
)
def test_the_products_of_other_steps_too(mesh, train):
    check_products(*run_on(mesh, **train))


def check_products(described, step, _, counted):
    # XLA merges equal products of what is computed again; all others are there.
    assert 0.95 * step.product_flops <= counted.flops <= step.product_flops
    assert 0.9 * described.model_flops <= 8 * step.product_flops <= 1.7 * described.model_flops


@pytest.mark.slow
def test_the_numbers_in_the_names_of_a_run_change_nothing_but_the_names(accumulated):
    described, _, compiled, counted = accumulated
    original = aot.compile_for(aot.parse_target("cpu:8"), described.program.lower_step(described.batch))
    plain = aot.inspect(original, described.program.mesh)
    assert (counted.memory, counted.work) == (plain.memory, plain.work)
    assert TAG.search(compiled.as_text()) and not TAG.search(original.as_text())


def test_the_numbered_program_computes_the_same():
    def loss(w, x):
        def layer(x, w):
            return jax.checkpoint(lambda x: jax.nn.gelu(x @ w))(x), None

        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    w, x = jax.random.normal(jax.random.key(0), (3, 8, 8)), jax.random.normal(jax.random.key(1), (4, 8))
    closed = jax.make_jaxpr(jax.grad(loss))(w, x)
    tagged = jax.jit(jax.extend.core.jaxpr_as_fun(walk(closed, 1).tagged)).lower(w, x).compile()
    plain = jax.jit(jax.grad(loss)).lower(w, x).compile()
    np.testing.assert_array_equal(tagged(w, x)[0], plain(w, x))
    assert aot.inspect(tagged).work == aot.inspect(plain).work
    assert TAG.search(tagged.as_text()) and not TAG.search(plain.as_text())
