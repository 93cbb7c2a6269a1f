"""The loop over ticks: sums and gradients of any schedule are those of a plain loop over microbatches."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.errors import ConfigError
from dsjax.pipelining.executor import Parts, Pipeline, Work
from dsjax.pipelining.partition import Partition, even, restacked, told
from dsjax.pipelining.schedule import forward_only, make_schedule
from dsjax.pipelining.slots import allot

WIDTH, ROWS, MOST = 4, 2, 7
INPUTS = jax.random.normal(jax.random.key(0), (MOST, ROWS, WIDTH))


def layers_of(depth):
    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "w": jax.random.normal(keys[0], (depth, WIDTH, WIDTH)) / 2,
        "b": jax.random.normal(keys[1], (depth, WIDTH)),
    }


def rest():
    """One matrix that both ends use, and one of each end's own."""
    keys = jax.random.split(jax.random.key(2), 3)
    return {
        name: jax.random.normal(k, (WIDTH, WIDTH)) / 2
        for name, k in zip(("tied", "first", "last"), keys, strict=True)
    }


def embed(rest, m):
    return jnp.tanh(INPUTS[m] @ rest["tied"] @ rest["first"])


def layer(own, state, x, m):
    """Depends on the microbatch by `state`; adds to the loss and to the extra `seen`."""
    h = jnp.tanh(x @ own["w"] + own["b"]) * (1 + 0.1 * m) + state["shift"]
    return (x + h, 0.1 * jnp.sum(h**2)), {"seen": (jnp.sum(jnp.abs(h)), jnp.float32(1))}


def head(rest, x, m):
    out = x @ rest["last"] @ rest["tied"].T
    return jnp.sum((out - 1) ** 2), (jnp.float32(ROWS), {"out": (jnp.sum(jnp.abs(out)), jnp.float32(ROWS))})


def tree(function):
    """A part of the model whose x is a tree of two arrays of different shapes."""

    def two(*arguments):
        *before, x, m = arguments
        if function is embed:
            hidden = embed(before[0] if before else x, m)
            return {"hidden": hidden, "sum": jnp.zeros((ROWS,), jnp.float32)}
        if function is layer:
            ((y, loss), extras) = layer(*before, x["hidden"], m)
            more = x["sum"] + jnp.sum(y, -1) * 0.125
            return ({"hidden": y + 0.01 * x["sum"][:, None], "sum": more}, loss), extras
        return head(*before, x["hidden"] * (1 + 0.1 * x["sum"][:, None]), m)

    return two


PLAIN, TREE = Parts(embed, layer, head), Parts(tree(embed), tree(layer), tree(head))
STATES = {"shift": 0.01 * jnp.arange(6.0)}


def one_by_one(parts, layers, rest, states, microbatches):
    """(loss, (weight, extras)) of the microbatches one after the other."""

    def one(m):
        def through(x, own):
            (y, loss), extras = parts.layer(*own, x, m)
            return y, (loss, extras)

        x, made = lax.scan(through, parts.embed(rest, m), (layers, states))
        of_layers, named = jax.tree.map(jnp.sum, made)
        loss, (weight, more) = parts.head(rest, x, m)
        return loss + of_layers, (weight, {**named, **more})

    return jax.tree.map(jnp.sum, lax.map(one, jnp.arange(microbatches)))


@cache
def wanted(kind, depth, microbatches):
    parts = TREE if kind == "tree" else PLAIN
    states = jax.tree.map(lambda leaf: leaf[:depth], STATES)

    def total(layers, rest):
        return one_by_one(parts, layers, rest, states, microbatches)

    (loss, (weight, extras)), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(
        layers_of(depth), rest()
    )
    return (loss, weight, extras), grads


def run(parts, partition, schedule, keep, evaluate=False):
    """Sums, and unless for evaluation gradients of the layers (in their order) and the rest."""
    stages, depth = partition.stages, partition.layers
    work = Work(schedule, allot(schedule, keep), partition.depth, partition.counts)
    order, slots = np.arange(depth), partition.slots
    states = jax.tree.map(lambda leaf: leaf[:depth], STATES)
    layers, states = jax.tree.map(lambda leaf: restacked(leaf, order, slots), (layers_of(depth), states))

    def body(layers, states, rest):
        pipeline = Pipeline(parts, work, layers, states, rest)
        if evaluate:
            return lax.psum(pipeline.evaluation(), "pipeline")
        zeros = jax.tree.map(jnp.zeros_like, (pipeline.sums, layers, rest))
        sums, of_layers, of_rest = pipeline.gradients(*zeros)
        return lax.psum((sums, of_rest), "pipeline"), of_layers

    mesh = jax.make_mesh(
        (stages,), ("pipeline",), devices=jax.devices()[:stages], axis_types=(jax.sharding.AxisType.Auto,)
    )
    cut = P("pipeline")
    out = P() if evaluate else (P(), cut)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(cut, cut, P()), out_specs=out, check_vma=False)
    compiled = jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 0})
    found = compiled(layers, states, rest())
    if evaluate:
        return found
    (sums, of_rest), of_layers = found
    return sums, (jax.tree.map(lambda leaf: restacked(leaf, slots, order), of_layers), of_rest)


def close(got, want):
    for path, value in jax.tree_util.tree_leaves_with_path(want):
        other = got
        for entry in path:
            other = other[getattr(entry, "key", getattr(entry, "idx", None))]
        worst = float(jnp.max(jnp.abs(other - value)) / jnp.maximum(jnp.max(jnp.abs(value)), 1e-3))
        assert worst < 1e-5, f"{jax.tree_util.keystr(path)}: off by {worst:.1e}"


CASES = [
    # schedule, microbatches, partition, keep, x
    ("1f1b", 5, even(4, 2), "inputs", "plain"),
    ("1f1b", 2, Partition(4, 1, (1, 2, 1, 1)), "inputs", "plain"),
    ("1f1b", 7, Partition(3, 1, (3, 1, 2)), "residuals", "plain"),
    ("gpipe", 4, Partition(2, 1, (1, 3)), "inputs", "tree"),
    ("gpipe", 4, even(5, 4), "residuals", "plain"),
    ("interleaved", 5, Partition(2, 2, (1, 2, 1, 1)), "inputs", "plain"),
    ("interleaved", 4, even(6, 2, 3), "residuals", "tree"),
    ("zero_bubble", 5, Partition(4, 1, (1, 2, 1, 1)), "residuals", "plain"),
    ("zero_bubble", 1, even(4, 2), "residuals", "tree"),
    ("1f1b", 3, Partition(1, 1, (2,)), "inputs", "plain"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{told(c[2])}-{c[3]}-{c[4]}")
def test_a_schedule_gives_what_a_plain_loop_gives(case):
    name, microbatches, partition, keep, kind = case
    schedule = make_schedule(name, partition.stages, microbatches, partition.virtual)
    got = run(TREE if kind == "tree" else PLAIN, partition, schedule, keep)
    close(got, wanted(kind, partition.layers, microbatches))


def test_unused_slots_get_no_gradient():
    partition = Partition(2, 1, (1, 3))
    schedule = make_schedule("1f1b", 2, 3)
    _, (of_layers, _) = run(PLAIN, partition, schedule, "inputs")
    back = jax.tree.map(lambda leaf: restacked(leaf, np.arange(4), partition.slots), of_layers)
    assert np.all(np.asarray(back["w"])[partition.slots < 0] == 0)
    assert np.all(np.max(np.abs(np.asarray(of_layers["w"])), axis=(1, 2)) > 1e-4)


@pytest.mark.parametrize(
    ("partition", "microbatches", "kind"),
    [(Partition(2, 1, (1, 3)), 5, "plain"), (even(5, 4), 2, "plain"), (Partition(2, 2, (1, 2, 1, 1)), 1, "plain")],
    ids=str,
)  # fmt: skip
def test_evaluation_sums_without_gradients_also_fewer_microbatches_than_stages(partition, microbatches, kind):
    schedule = forward_only(partition.stages, microbatches, partition.virtual)
    close(
        run(PLAIN, partition, schedule, "inputs", evaluate=True),
        wanted(kind, partition.layers, microbatches)[0],
    )


@pytest.mark.parametrize(
    ("changed", "made"),
    [(lambda x: x[:, :3], "float32[2, 3]"), (lambda x: x.astype(jnp.bfloat16), "bfloat16[2, 4]")],
    ids=["shape", "type"],
)
def test_a_layer_that_makes_something_else_than_it_gets_is_refused(changed, made):
    def other(own, state, x, m):
        ((y, loss), extras) = layer(own, state, x, m)
        return (changed(y), loss), extras

    with pytest.raises(ConfigError) as refused:
        run(Parts(embed, other, head), even(4, 2), make_schedule("1f1b", 2, 2), "inputs")
    assert len(refused.value.faults) == 1
    assert str(refused.value).startswith(f"stages: embed gives float32[2, 4] but a layer makes {made} of it")
