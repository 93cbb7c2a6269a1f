"""Which layer computes in which format: policies, tables of kinds and paths, and what is refused."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from dsjax.config import from_dict
from dsjax.config.precision import Fp8Config, PrecisionConfig
from dsjax.errors import ConfigError
from dsjax.models import build
from dsjax.precision import Policy
from dsjax.precision.delayed import DelayedDot
from dsjax.precision.fp8 import Fp8Dot
from dsjax.precision.policy import layers_of


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
        self.mlp = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.mlp(self.attention(self.norm(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(10, 8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def policy(platform: str = "cpu", **settings) -> Policy:
    return Policy.of(PrecisionConfig(**settings), platform)


def model() -> Model:
    return Model(nnx.Rngs(0))


def applied(policy: Policy, model: nnx.Module) -> nnx.Module:
    policy.apply(model)
    return model


def in_fp8(model: nnx.Module) -> list[str]:
    return [
        layer.path
        for layer in layers_of(model)
        if isinstance(getattr(layer.module, "dot_general", None), Fp8Dot | DelayedDot)
    ]


def test_layers_are_found_in_the_order_of_attributes_with_their_kinds() -> None:
    found = [(layer.path, layer.kind) for layer in layers_of(model())]
    assert found[0] == ("embed", "embedding") and found[-1] == ("head", "matmul")
    assert ("blocks/0/norm", "norm") in found and ("blocks/1/attention/query", "matmul") in found


def test_fp8_is_of_all_products_but_the_first_and_last_of_the_model() -> None:
    made = applied(policy(policy="fp8"), model())
    inside = [f"blocks/{i}/{name}" for i in (0, 1) for name in
              ("attention/query", "attention/key", "attention/value", "attention/out", "mlp")]  # fmt: skip
    assert in_fp8(made) == inside
    assert made.head.dtype == jnp.bfloat16 and made.head.dot_general is not made.blocks[0].mlp.dot_general
    assert made(jnp.zeros((2, 3), jnp.int32)).dtype == jnp.bfloat16
    (note,) = policy(policy="fp8").notes(policy(policy="fp8").apply(model()))
    assert note == "precision: products of 10 layers in fp8, scaling tensor; not in head"


def test_a_table_names_kinds_layers_and_what_they_are_part_of_and_the_last_counts() -> None:
    table = {"norm": "bf16", "blocks/*/attention": "fp8", "blocks/1": "bf16", "head": "fp32"}
    made = applied(policy(policy="fp16", table=table), model())
    assert in_fp8(made) == [f"blocks/0/attention/{name}" for name in ("query", "key", "value", "out")]
    assert made.blocks[0].norm.dtype == made.blocks[1].mlp.dtype == jnp.bfloat16
    assert made.blocks[0].mlp.dtype == made.embed.dtype == jnp.float16 and made.head.dtype == jnp.float32


def test_what_a_table_names_is_not_its_norms_unless_it_says_so() -> None:
    made = applied(policy(policy="bf16", table={"blocks/0": "fp32"}), model())
    assert made.blocks[0].norm.dtype is None and made.blocks[0].mlp.dtype == jnp.float32


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"block/0": "bf16"}, "no layer is meant by 'block/0': did you mean blocks/0"),
        ({"embed": "fp8"}, "embed cannot multiply in it: a layer can that has an attribute `dot_general`"),
        ({"norm": "fp8"}, "'norm' asks for fp8, and blocks/0/norm, blocks/1/norm cannot multiply in it"),
        ({"blocks/0/mpl": "fp8"}, "did you mean blocks/0/mlp"),
    ],
)
def test_a_table_that_does_nothing_is_refused(table, message) -> None:
    with pytest.raises(ConfigError, match=message):
        applied(policy(policy="bf16", table=table), model())


def test_a_model_without_products_that_can_be_given_is_refused() -> None:
    class Own(nnx.Module):
        def __init__(self):
            self.dtype = None

    with pytest.raises(ConfigError, match="nothing is left"):
        applied(policy(policy="fp8"), Own())


def test_a_product_that_the_author_gave_is_left_alone() -> None:
    own = model()
    mine = lambda *args, **more: lax.dot_general(*args, **more)  # noqa: E731
    own.blocks[0].mlp.dot_general = mine
    assert "blocks/0/mlp" not in in_fp8(applied(policy(policy="fp8"), own))


def test_the_exact_policy_has_the_same_variables_and_multiplies_in_fp32() -> None:
    delayed = policy(policy="fp8", fp8=Fp8Config(scaling="delayed", history=3))
    rounds, exact = applied(delayed, model()), applied(delayed.exact, model())
    assert nnx.state(rounds).flat_state().paths == nnx.state(exact).flat_state().paths
    tokens = jnp.ones((2, 3), jnp.int32)
    assert (exact(tokens) == model()(tokens)).all() and exact(tokens).dtype == jnp.float32
    assert not (rounds(tokens) == exact(tokens)).all()


def llama() -> nnx.Module:
    fields = {"kind": "llama", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
              "intermediate_size": 32, "vocab_size": 40}  # fmt: skip
    config = from_dict({"model": fields, "train": {"steps": 1, "global_batch_size": 1, "sequence_length": 8}})
    return build(config.model, platform="cpu", max_length=8).init(nnx.Rngs(0))


def test_a_stack_of_layers_has_a_history_for_each() -> None:
    delayed = policy(policy="fp8", fp8=Fp8Config(scaling="delayed", history=4))
    made = applied(delayed, llama())
    assert len(in_fp8(made)) == 7
    assert made.layers.attention.o_proj.dot_general.inputs.shape == (3, 4)
    assert made.layers.mlp.down_proj.dot_general.probe.shape == (3, 2)


def test_a_head_computes_in_the_type_that_a_table_gives_it() -> None:
    tokens = jnp.ones((1, 4), jnp.int32)
    narrow, wide = (applied(policy(policy="bf16", table=table), llama()) for table in ({}, {"head": "fp32"}))
    assert wide.head_dtype == jnp.float32 and narrow.head_dtype == jnp.bfloat16
    assert not (narrow(tokens) == wide(tokens)).all()


def test_norms_of_llamas_round_in_bf16_where_they_are_asked_to() -> None:
    tokens = jnp.ones((1, 4), jnp.int32)
    plain, rounded = (
        applied(policy(policy="bf16", table=table), llama()) for table in ({}, {"norm": "bf16"})
    )
    assert not (plain.hidden(tokens) == rounded.hidden(tokens)).all()


def test_a_layer_of_a_users_own_needs_a_type_and_a_product_and_no_kernel() -> None:
    class Own(nnx.Module):
        def __init__(self):
            self.dtype = self.dot_general = None
            self.weight = nnx.Param(jnp.ones((8, 8)))

    class Outer(nnx.Module):
        def __init__(self):
            self.first, self.inner = Own(), Block(nnx.Rngs(0))

    assert "first" in policy(policy="fp8").apply(Outer()).could_be
    assert policy(policy="bf16", table={"first": "fp8"}).apply(Outer()).in_fp8 == ("first",)


def test_products_of_batches_of_matrices_stay_as_they_are() -> None:
    class Batched(nnx.Module):
        def __init__(self):
            self.inner = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(3)])
            self.each = nnx.LinearGeneral(4, 4, batch_axis={0: 2}, rngs=nnx.Rngs(0))

    assert "each" not in policy(policy="fp8").apply(Batched()).in_fp8


def test_a_model_that_leaves_no_type_open_is_told() -> None:
    fixed = nnx.Linear(4, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    one = policy(policy="bf16")
    (note,) = one.notes(one.apply(fixed))
    assert note.startswith(
        "precision: no layer of this model leaves its type open, so none is computed in bfloat16"
    )


def test_only_layers_of_the_policys_type_are_gathered_in_it() -> None:
    made = model()
    made.blocks[0].mlp.dtype = jnp.float32
    narrow = policy(policy="bf16").apply(made).narrow
    assert "blocks/1/mlp" in narrow and "blocks/0/mlp" not in narrow and "blocks/0/norm" not in narrow
