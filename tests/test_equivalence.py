"""The matrix: every layout, accumulation, recomputation and mask gives what one device gives.

A later part enters by one line: its setting and its values in `SETTINGS`.  A pairwise cover has
every two values of every two settings meet in some case: `make test` runs its first cases, in which
nine of ten such pairs meet, `make test-all` all of them, and the whole product of the settings in
`PRODUCT`, with the others drawn in turn.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from cover import pairs_of, pairwise
from oracle import AXES, BATCH, MODELS, PLAIN, devices_of, on_one_device, train

SETTINGS: dict[str, tuple[Any, ...]] = {
    "pipeline": (
        (1, "1f1b"),
        (2, "1f1b"),
        (4, "1f1b"),
        (4, "gpipe"),
        (2, "interleaved"),
        (2, "zero_bubble"),
        (4, "zero_bubble"),
        (2, "1f1b_kept"),
    ),
    "data": (1, 2, 4),
    "fsdp": (1, 2, 4),
    "context": (1, 2, 4),
    "expert": (1, 2, 4),
    "tensor": (1, 2, 4, (2, 2)),
    "gradient_accumulation_steps": (1, 2, 4),
    "remat": ("none", "full", "dots", "every_2"),
    "model": tuple(MODELS),
    "rows": ("full", "ragged", "packed"),
    "fsdp_gather": ("layer", "step"),
    "dropout": (0.0, 0.1),
    "tied": (False, True),
    # Not adafactor and lion: the one divides by gradients' own size (its eps is 1e-30), the other takes their sign,
    # so that rounding noise, where there is no true gradient, becomes steps of full size.
    "optimizer": ("adamw", "muon", "sgd"),
    "window": (None, 7),
    # Neither number divides by stages or chunks; four stages of two chunks want eight.
    "layers": (5, 9),
    "exchange": ("plain", "pairs", "groups", "warming"),
    "restart": ("none", "memory", "disk"),
    # A loss scale, as fp16 needs it, is a power of two and changes no number of fp32.
    "scaled": (False, True),
    "lora": ("none", "all", "some"),
}
PRODUCT = (*AXES, "gradient_accumulation_steps", "remat", "rows")
DEVICES = 8
QUICK = 48
"""Cases of the cover that are run each time."""
TOLERANCE = 1e-5


def allowed(case: Mapping[str, Any]) -> bool:
    """Whether a (partial) case fits the devices and the batch."""
    model = case.get("model", "mixtral")
    if case.get("expert", 1) > 1 and "router_aux_loss_coef" not in MODELS[model]:
        return False  # refused, with the reason
    if case.get("window") is not None and model in ("deepseek_v3", "gpt2", "olmo2"):
        return False  # they have none
    if model == "deepseek_v3" and case.get("tensor") == (2, 2) and case.get("pipeline", (1,))[0] > 1:
        return False  # refused, with the reason
    parts = (
        case.get("data", 1)
        * case.get("fsdp", 1)
        * case.get("expert", 1)
        * case.get("gradient_accumulation_steps", 1)
    )
    stages, schedule = case.get("pipeline", (1, "1f1b"))
    remat = case.get("remat", "none")
    if stages > 1 and (remat == "every_2" or (schedule == "zero_bubble" and remat != "none")):
        return False  # refused, with the reason
    if (stages, schedule) == (4, "interleaved") and case.get("layers", 9) < 8:
        return False
    return devices_of(case) <= DEVICES and BATCH % parts == 0 and BATCH // parts >= stages


def product() -> Iterator[dict[str, Any]]:
    """Every case of the settings in PRODUCT; cases that differ in their rows alone share a program."""
    for values in itertools.product(*(SETTINGS[name] for name in PRODUCT)):
        case = dict(zip(PRODUCT, values, strict=True))
        if allowed(case):
            rng = random.Random(repr([value for name, value in case.items() if name != "rows"]))
            yield {name: rng.choice(SETTINGS[name]) for name in SETTINGS} | case


def label(case: Mapping[str, Any]) -> str:
    """The settings that differ from one plain device."""
    return "-".join(f"{name}={value}" for name, value in case.items() if value != PLAIN[name]) or "plain"


def close(name: str, got: np.ndarray, want: np.ndarray, least: float) -> None:
    """Within 1e-5 of the array's largest value, or of `least` where the array is smaller than that."""
    scale = max(float(np.max(np.abs(want))), least)
    worst = float(np.max(np.abs(got - want)))
    assert worst <= TOLERANCE * scale, f"{name}: off by {worst:.2e} where the largest value is {scale:.2e}"


def check(case: Mapping[str, Any]) -> None:
    case = {**PLAIN, **case}
    got = train(case)
    want = on_one_device(case)
    np.testing.assert_allclose(got.losses, want.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(got.norms, want.norms, rtol=TOLERANCE)
    for step, gradients in enumerate(want.gradients):
        for name, value in gradients.items():
            close(f"gradient of {name} at step {step + 1}", got.gradients[step][name], value, 1e-3)
    for name, value in want.params.items():
        # What begins at zero is added to something: biases and adapters to products with weights, which are drawn at
        # 0.02, Gemma's norms to 1.
        close(f"parameter {name}", got.params[name], value, 0.02)


def cover() -> list[Any]:
    """The pairwise cover, in the order in which it meets most new pairs."""
    return [
        pytest.param(case, id=label(case), marks=() if number < QUICK else pytest.mark.slow)
        for number, case in enumerate(pairwise(SETTINGS, allowed))
    ]


@pytest.mark.parametrize("case", cover())
def test_a_layout_equals_one_device(case: dict[str, Any]) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(product()), ids=label)
def test_the_whole_product_equals_one_device(case: dict[str, Any]) -> None:
    check(case)


def test_every_pair_of_values_is_covered() -> None:
    cases = pairwise(SETTINGS, allowed)
    covered, soon = (set().union(*map(pairs_of, some)) for some in (cases, cases[:QUICK]))
    possible = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(SETTINGS, 2)
        for x, y in itertools.product(SETTINGS[a], SETTINGS[b])
        if allowed({a: x, b: y})
    }
    assert possible <= covered and len(possible & soon) >= 0.9 * len(possible)
