"""What a frame may ask of a decoder beyond what the dense families do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsjax.config.schema import ModelConfig
from dsjax.models import Decoder, build
from dsjax.models.spec import LayerKind
from dsjax.models.transformer import Layer

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 29,
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 29, (2, 8)), jnp.int32)


def family(kind: str = "llama", **fields: Any) -> Any:
    return build(ModelConfig(kind=kind, **{**SIZES, **fields}), platform="cpu", max_length=8).family


class Telling(nnx.Module):
    """A feed-forward part that adds to the loss and to a metric."""

    def __init__(self, inner: nnx.Module):
        self.inner = inner

    def __call__(self, x_bsd: jax.Array) -> Any:
        return self.inner(x_bsd), jnp.sum(x_bsd**2), {"load": (jnp.sum(x_bsd), jnp.asarray(1.0))}


def test_what_layers_add_to_the_loss_and_metrics_is_summed_over_them() -> None:
    llama = family()
    plain = Decoder(llama.frame(), rngs=nnx.Rngs(0))
    parts = llama.parts()
    telling = replace(parts, mlp=lambda rngs: Telling(parts.mlp(rngs)))
    number = jax.ShapeDtypeStruct((), jnp.float32)
    adds = (("load", (number, number)),)
    frame = replace(llama.frame(), layer=lambda rngs: Layer(telling, rngs=rngs), adds=adds)
    model = Decoder(frame, rngs=nnx.Rngs(0))
    hidden, loss, metrics = model.outputs(TOKENS)
    np.testing.assert_array_equal(hidden, plain.hidden(TOKENS))
    # Each layer's input of the feed-forward part is normalised: its squares sum to its size.
    np.testing.assert_allclose(loss, 3 * TOKENS.size * 16, rtol=1e-2)
    assert metrics.keys() == {"load"} and float(metrics["load"][1]) == 3
    assert plain.outputs(TOKENS)[1:] == (None, {})


def test_layers_of_another_shape_stand_before_the_others() -> None:
    llama, wide = family(), family(intermediate_size=40)
    parts = wide.parts()
    frame = replace(llama.frame(), dense_layers=2, dense_layer=lambda rngs: Layer(parts, rngs=rngs), layers=1)
    model = Decoder(frame, rngs=nnx.Rngs(0))
    assert model.dense_layers.mlp.up_proj.kernel.shape == (2, 16, 40)
    assert model.layers.mlp.up_proj.kernel.shape == (1, 16, 24)

    x = model.embed(TOKENS)
    where = frame.where(jnp.arange(8)[None], None, False)
    for stack, number in ((model.dense_layers, 0), (model.dense_layers, 1), (model.layers, 0)):
        graph, state = nnx.split(stack)
        x = nnx.merge(graph, jax.tree.map(lambda leaf, i=number: leaf[i], state))(x, where)
    np.testing.assert_allclose(model.hidden(TOKENS), model.norm(x), atol=1e-5)


def test_layers_know_their_kind_and_training_does_not_change_it() -> None:
    gemma = family("gemma3_text", sliding_window=3, sliding_window_pattern=2, num_key_value_heads=1)
    model = Decoder(gemma.frame(), rngs=nnx.Rngs(0))
    assert gemma.windows == (3, None) and len(gemma.rotaries()) == 2
    (kind,) = [v for _, v in nnx.iter_graph(model) if isinstance(v, LayerKind)]
    assert kind[...].tolist() == [0, 1, 0] and kind[...].dtype == jnp.int32
    model(TOKENS)
    assert kind[...].tolist() == [0, 1, 0]
    # Layers that are all alike have none.
    alike = Decoder(family("mistral", sliding_window=3, num_key_value_heads=1).frame(), rngs=nnx.Rngs(0))
    assert not [v for _, v in nnx.iter_graph(alike) if isinstance(v, LayerKind)]
