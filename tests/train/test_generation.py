"""Answers are what the model finds, whatever stands beside them: other prompts, a mesh, a cache or none."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dsjax
from dsjax.config import from_dict
from dsjax.errors import ConfigError
from dsjax.train.assemble import program_for
from dsjax.train.generation import Generator, folded
from dsjax.train.next_tokens import Prompt, bucket
from dsjax.train.sampling import Sampling, draw

VOCAB = 60
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": VOCAB, "initializer_range": 0.3, "intermediate_size": 48,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", **SIZES, "dropout": 0.2},
    "mixture": {
        "kind": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "capacity_factor": 0.5,
    },
}  # fmt: skip
MODELS["fp8"] = MODELS["llama"]
PRECISION = {"fp8": {"policy": "fp8", "fp8": {"scaling": "delayed"}}}
GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 3, 8, 40], [7], list(range(1, 31)), [9, 9]]
# Chunks of several sizes, and the end of one.
LONG = [list(np.random.default_rng(0).integers(1, VOCAB, n)) for n in (130, 3)]


@cache
def program(model: str, **mesh: int) -> Any:
    config = from_dict(
        {
            "model": MODELS[model],
            "precision": PRECISION.get(model, {}),
            "train": {"global_batch_size": 8, "sequence_length": 64},
            "mesh": mesh,
        }
    )
    made, _ = program_for(config, jax.devices()[: int(np.prod(list(mesh.values())))])
    made.compiler_options = {"xla_backend_optimization_level": 0}
    return made, made.init(seed=3)


def answers(
    model: str,
    prompts: list[list[int]],
    sampling: Sampling,
    room: int = 6,
    ends: tuple[int, ...] = (),
    **mesh: int,
) -> list[list[int]]:
    made, state = program(model, **mesh)
    asked = [Prompt(ids, room, (1, number, 0)) for number, ids in enumerate(prompts)]
    return told(Generator(made, sampling, ends), state, asked)


def told(generator: Generator, state: Any, asked: list[Prompt], at_once: int = 16) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in asked]
    over = []
    for number, token in generator.answers(state, asked, at_once):
        assert number not in over
        over += [number] * (token is None)
        found[number] += [] if token is None else [token]
    assert sorted(over) == list(range(len(asked)))
    return found


def likeliest(model: str, ids: list[int], room: int) -> list[int]:
    """Without a cache, a chunk or a mesh: the whole sequence for each token."""
    made, state = program(model)
    plain = nnx.merge(made.parts.graph, state.params, state.model_state, copy=True)
    plain.eval()
    if model == "mixture":
        plain.layers.mlp.take_all()
    run = nnx.jit(lambda model, tokens: model(tokens))
    tokens = np.zeros((1, max(map(len, [ids, *PROMPTS])) + room), np.int32)
    tokens[0, : len(ids)] = ids
    for place in range(len(ids), len(ids) + room):
        tokens[0, place] = int(jnp.argmax(run(plain, jnp.asarray(tokens))[0, place - 1]))
    return [int(token) for token in tokens[0, len(ids) : len(ids) + room]]


@pytest.mark.parametrize("model", ["llama", "mixture"])
def test_prompts_of_several_lengths_go_on_as_each_does_alone_without_a_cache(model: str) -> None:
    assert answers(model, PROMPTS, GREEDY) == [likeliest(model, ids, 6) for ids in PROMPTS]


def test_a_prompt_of_several_chunks_goes_on_as_without() -> None:
    assert answers("llama", LONG, GREEDY, 3) == [likeliest("llama", ids, 3) for ids in LONG]


@pytest.mark.parametrize(
    "model, mesh",
    [
        ("llama", {"fsdp": 2, "tensor": 2}),
        ("llama", {"pipeline": 2, "context": 2, "tensor": 2}),
        ("mixture", {"data": 2, "expert": 2}),
    ],
)
def test_what_is_drawn_does_not_depend_on_the_mesh(model: str, mesh: dict[str, int]) -> None:
    warm = Sampling(1.0, 20, 0.9)
    assert answers(model, PROMPTS, warm, **mesh) == answers(model, PROMPTS, warm)


def test_stages_and_ranks_of_a_sequence_hold_shards_instead() -> None:
    made, _ = program("llama", pipeline=2, context=2, tensor=2)
    sizes = folded(made).mesh.shape
    assert (sizes["pipeline"], sizes["context"], sizes["fsdp"], sizes["tensor"]) == (1, 1, 4, 2)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_drawn_does_not_depend_on_other_prompts(model: str) -> None:
    made, state = program(model)
    generator = Generator(made, Sampling(1.2))
    asked = [Prompt(ids, 7 - number, (1, number, 0)) for number, ids in enumerate(PROMPTS)]
    together = told(generator, state, asked)
    assert told(generator, state, asked, at_once=1) == together
    assert [len(one) for one in together] == [7, 6, 5, 4]


def test_each_seed_prompt_and_sample_draws_its_own() -> None:
    made, state = program("llama")
    names = [(seed, number, sample) for seed in (0, 1) for number in (0, 1) for sample in (1, 2)]
    found = told(Generator(made, Sampling(1.5)), state, [Prompt([4], 8, name) for name in names])
    assert len({tuple(one) for one in found}) == len(names)


def test_an_end_ends_its_own_row_alone() -> None:
    free = answers("llama", PROMPTS, GREEDY)
    end = free[0][2]
    want = [one[: one.index(end)] if end in one else one for one in free]
    assert len(want[0]) == 2 or end in free[0][:2]
    assert answers("llama", PROMPTS, GREEDY, ends=(VOCAB + 3, end)) == want


def test_prompts_of_many_lengths_share_their_programs() -> None:
    made, state = program("llama")
    generator = Generator(made, GREEDY)
    for length in (70, 100, 129, 200):
        told(generator, state, [Prompt([1] * length, 2)])
    way: Any = generator._way
    lengths = {bucket(n) for n in (128, 256)}
    assert way._prefill.jitted._cache_size() == way._next.jitted._cache_size() == len(lengths) == 2


class Net(nnx.Module):
    """A user's own: it has no cache."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
        self.mix = nnx.Linear(16, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        return self.mix(jnp.cumsum(x, axis=1)) * 3


def test_a_model_that_cannot_be_called_is_refused(tmp_path: Any) -> None:
    class Silent(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)

    trainer = dsjax.Trainer(
        Silent, lambda model, batch: (0.0, 1.0), optax.sgd(0.1), run={"dir": str(tmp_path)}
    )
    with pytest.raises(ConfigError, match=r"Silent has no __call__\(tokens\) -> logits"):
        trainer.generator()


def test_a_users_model_computes_the_whole_sequence_and_says_so(tmp_path: Any) -> None:
    trainer = dsjax.Trainer(
        Net, lambda model, batch: (0.0, 1.0), optax.sgd(0.1), mesh={"fsdp": 2}, devices=jax.devices()[:2],
        run={"dir": str(tmp_path)},
    )  # fmt: skip
    state = trainer.init(0)
    generator = trainer.generator(temperature=0)
    found = generator(state, PROMPTS, max_tokens=4)
    logits = nnx.jit(lambda model, tokens: model(tokens))
    for ids, got in zip(PROMPTS, found, strict=True):
        tokens = jnp.zeros((1, 40), jnp.int32).at[0, : len(ids) + 4].set(jnp.asarray([*ids, *got]))
        best = jnp.argmax(logits(trainer.model(state), tokens)[0], -1)
        assert got == best[len(ids) - 1 : len(ids) + 3].tolist()
    assert "no model of dsjax's own families" in str(generator.whole_because)


@pytest.mark.parametrize(
    "how, line",
    [
        ({"top_p": 0.0}, "top_p: takes a number > 0 and <= 1, got 0; .* temperature to 0"),
        ({"top_k": -1}, "top_k: takes an integer >= 0"),
        ({"temperature": -1.0}, "temperature: takes a number >= 0, got -1"),
        ({"temperature": float("nan")}, "temperature: takes a number >= 0, got nan"),
    ],
)
def test_sampling_that_leaves_nothing_is_refused(how: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        Sampling(**how)


@pytest.mark.parametrize(
    "how, kept",
    [
        (Sampling(1.0, 2), {1, 3}),
        (Sampling(1.0, 0, 0.6), {1, 3}),
        (Sampling(1.0, 0, 0.5), {3}),
        (GREEDY, {3}),
    ],
)
def test_only_the_likeliest_are_drawn(how: Sampling, kept: set[int]) -> None:
    logits = jnp.log(jnp.asarray([0.1, 0.25, 0.1, 0.55]))
    keys = jax.random.split(jax.random.key(0), 200)
    assert set(np.asarray(jax.vmap(lambda key: draw(logits, key, how))(keys)).tolist()) == kept


def compiled(room: int, **mesh: int) -> tuple[Any, int]:
    """The program of a token with caches for so many, and their bytes on a device."""
    made, state = program("llama", **mesh)
    way: Any = Generator(made, GREEDY)._way
    weights = (state.params, state.model_state)
    carry = way.begin(weights, [Prompt([1], room)] * 2, 2)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(carry["caches"]))
    return way._next.jitted.lower(weights, carry).compile(), held


def test_a_token_reads_caches_where_they_lie() -> None:
    (short, few), (long, many) = compiled(1000), compiled(8000)
    more = [p.memory_analysis().temp_size_in_bytes for p in (short, long)]
    # Of two layers one at a time is worked on.
    assert more[1] - more[0] < 0.8 * (many - few)
    assert long.memory_analysis().alias_size_in_bytes > many


def test_caches_never_cross_the_mesh() -> None:
    one, cut = compiled(2000), compiled(2000, fsdp=2, tensor=2)
    assert cut[1] == one[1] / 4
    text = cut[0].as_text()
    crossing = [
        line
        for line in text.splitlines()
        if re.search(r"(all-gather|all-reduce|all-to-all|permute)[\w-]*\(", line)
    ]
    assert crossing and "2048" in text
    assert not [line for line in crossing if re.search(r"\[[\d,]*\b2048\b", line)]
