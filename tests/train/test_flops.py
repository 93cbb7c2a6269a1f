"""Model FLOPs: of families, and of steps in which not everything trains."""

from __future__ import annotations

import jax
import pytest
from flax import nnx
from oracle import MODELS, PLAIN, config_of

from dsjax.config import from_dict
from dsjax.mesh import named_leaves
from dsjax.models import build
from dsjax.models.adapters import is_adapter
from dsjax.train.assemble import abstract_model, model_of

SIZES = {
    "kind": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 128,
}  # fmt: skip
LAYER, HEAD, RANK = 2 * 64 * (64 + 32) + 3 * 64 * 96, 64 * 128, 4
# Of each of seven matrices: what goes in and what comes out, in the sum over them.
ADAPTERS = 3 * RANK * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 96))


@pytest.mark.parametrize("kind", MODELS)
def test_of_no_length_they_are_six_for_each_number_of_the_matrices_that_a_token_passes(kind):
    config = config_of({**PLAIN, "model": kind})
    model = build(config.model, platform="cpu", vocab_size_hint=67, remat="none", max_length=32)
    family = model.family
    params = named_leaves(nnx.state(nnx.eval_shape(lambda: model.init(nnx.Rngs(0))), nnx.Param))
    passed = sum(
        leaf.size * (family.num_experts_per_tok / family.experts if "/experts/" in name else 1)
        for name, leaf in params.items()
        if name.endswith("/kernel")
    )
    # Columns that pad the vocabulary do not count; the head is used again for each token that is foretold ahead.
    hidden = params["norm/scale"].size
    heads = 1 + getattr(family, "num_nextn_predict_layers", 0)
    passed += hidden * (heads * 67 - family.padded_vocab)
    assert family.flops_per_token(0) == pytest.approx(6 * passed)


def flops(length=32, **sections):
    config = from_dict({"model": SIZES, **sections})
    return model_of(config, "cpu", None).flops_per_token(length)


def test_frozen_matrices_get_no_gradient():
    whole = flops()
    attention = whole - 6 * (3 * LAYER + HEAD)
    assert flops(lora={"rank": RANK}) == pytest.approx(4 * (3 * LAYER + HEAD) + 6 * ADAPTERS + attention)
    some = flops(optimizer={"trainable": ["layers/attention/*"]})
    assert some == pytest.approx(whole - 2 * (3 * 3 * 64 * 96 + HEAD))
    assert flops(optimizer={"trainable": ["*"]}) == pytest.approx(whole)


def test_without_a_way_back_through_the_layers_they_are_not_known():
    assert flops(optimizer={"trainable": ["head/kernel", "norm/scale"]}) is None


def test_a_step_with_adapters_computes_what_is_counted():
    """XLA's own count of a compiled step: layers unrolled, without attention's softmax and the like, within 10%."""
    config = from_dict({"model": SIZES, "lora": {"rank": RANK}})
    model = model_of(config, "cpu", None)

    graph, params = nnx.split(abstract_model(model, config.lora))
    adapters, rest = nnx.split_state(params, lambda path, _: is_adapter("/".join(map(str, path))), ...)
    tokens = jax.ShapeDtypeStruct((4, 32), "int32")

    def loss(adapters, rest, tokens):
        return nnx.merge(graph, nnx.merge_state(adapters, rest))(tokens).sum()

    found = jax.jit(jax.grad(loss)).lower(adapters, rest, tokens).compile().cost_analysis()["flops"]
    assert found / 128 == pytest.approx(model.flops_per_token(32), rel=0.1)
