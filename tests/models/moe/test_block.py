"""A mixture on any mesh gives what it gives on one device: output, loss, extras, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from dsjax.errors import ConfigError
from dsjax.mesh import Layout, make_mesh, use_layout
from dsjax.models.layers import normal
from dsjax.models.moe import Mixture, MixtureConfig, Routing, mixture_axes
from dsjax.models.moe.router import LOAD

B, S, D, M, E = 8, 16, 32, 48, 8
MESHES = [
    {"expert": 8},
    {"expert": 4, "data": 2},
    {"expert": 2, "fsdp": 2, "context": 2},
    {"expert": 2, "fsdp": 2, "tensor": 2},
    {"expert": 2, "tensor": [2, 2]},
    {"context": 2, "tensor": 4},
    {"data": 2, "fsdp": 4},
]
AXES = {path.removeprefix("moe/"): names[1:] for path, names in mixture_axes("moe").items()}


def block(**changed):
    routing = Routing(E, 2, capacity=changed.pop("capacity", None))
    config = MixtureConfig(D, M, routing, 3, balance=0.1, z=0.01, **changed)
    return nnx.split(Mixture(config, init=lambda i, o: normal(0.2), rngs=nnx.Rngs(0)), nnx.Param, ...)


def inputs():
    x = jax.random.normal(jax.random.key(1), (B, S, D))
    segments = jnp.asarray(np.arange(S) < np.random.default_rng(0).integers(2, S + 1, (B, 1)), jnp.int32)
    return x, segments


def run(graph, params, others, x, segments):
    def total(params, x):
        y, loss, extras = nnx.merge(graph, params, others)(x, segments)
        return jnp.sum(jnp.sin(y)) + loss, (y, extras)

    (loss, (y, extras)), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(params, x)
    return loss, y, extras, grads


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_any_mesh(mesh, capacity):
    graph, params, others = block(capacity=capacity)
    want = jax.jit(lambda *args: run(graph, *args))(params, others, *inputs())
    layout = Layout(make_mesh({"fsdp": 1, **mesh}), AXES)
    layout.check(params)
    x, segments = inputs()
    x = jax.device_put(x, layout.sharding("batch", "sequence", None))
    placed = jax.device_put(params, layout.param_shardings(params))
    with use_layout(layout):
        got = jax.jit(lambda *args: run(graph, *args))(placed, others, x, segments)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        scale = max(float(jnp.max(jnp.abs(b))), 1e-3)
        assert float(jnp.max(jnp.abs(a - b))) <= 1e-5 * scale, path


def test_what_is_told():
    graph, params, others = block(capacity=1.0)
    x, segments = inputs()
    _, _, extras, _ = run(graph, params, others, x, segments)
    tokens = float(segments.sum())
    assert extras["router_entropy"][1] == tokens
    assert 0 < extras["router_entropy"][0] / tokens < np.log(E)
    assert extras["dropped"][1] == 2 * tokens
    assert 0 < extras["dropped"][0] < tokens
    assert extras[LOAD].sum.shape == (3, E)
    assert extras[LOAD].sum[0].sum() == 2 * tokens and extras[LOAD].sum[1:].sum() == 0


def test_experts_lie_over_their_axis_and_all_else_is_cut_over_it():
    layout = Layout(make_mesh({"expert": 2, "fsdp": 2, "tensor": 2}), mixture_axes("moe"))
    assert layout.param_spec("moe/experts/gate_proj/kernel", (3, E, D, M))[1:] == ("expert", "fsdp", "tensor")
    assert layout.param_spec("moe/experts/down_proj/kernel", (3, E, M, D))[1:] == ("expert", "tensor", "fsdp")
    assert layout.param_spec("moe/router/kernel", (3, D, E))[1] == ("fsdp", "expert")
    assert layout.gathered_over("moe/experts/up_proj/kernel") == ("fsdp", "context")
    assert layout.gathered_over("moe/router/kernel") == ("fsdp", "expert", "context")


def test_shards_that_do_not_divide_the_experts_and_models_without_any():
    _, params, _ = block()
    with pytest.raises(ConfigError, match="3 shards do not divide 8 experts; use one of 1, 2, 4, 8"):
        Layout(make_mesh({"expert": 3, "fsdp": 1}, jax.devices()[:3]), AXES).check(params)
    with pytest.raises(ConfigError, match="2 shards of experts, but no parameter"):
        Layout(make_mesh({"expert": 2, "fsdp": 4}), {}).check(params)


def test_parameters_at_rest_lie_as_the_layout_says():
    _, params, _ = block()
    layout = Layout(make_mesh({"expert": 4, "fsdp": 2}), AXES)
    placed = jax.device_put(params, layout.param_shardings(params))
    kernel = placed["experts"]["gate_proj"]["kernel"][...]
    assert isinstance(kernel.sharding, NamedSharding)
    assert kernel.addressable_shards[0].data.shape == (E // 4, D // 2, M)
