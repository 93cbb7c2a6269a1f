"""XLA presets: each option checked against this jaxlib, the user's own winning."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dsjax.backend import xla_options
from dsjax.backend.xla_options import PRESETS, choose


@pytest.mark.parametrize("platform", PRESETS)
def test_every_option_of_the_preset_is_used_or_said_to_be_left_out(platform: str) -> None:
    chosen = choose(platform, {})
    left_out = [
        name for note in chosen.notes for name in note.partition(": left out")[2].split(": ")[1].split(", ")
    ]
    assert {*chosen.options, *left_out} == set(PRESETS[platform])
    # Newer versions of XLA retired these, whose work they always do.
    assert all("_pipelined_" in name for name in left_out)


def test_the_options_compile() -> None:
    chosen = choose("cpu", {})
    assert chosen.options and not chosen.notes
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile(compiler_options=chosen.options)
    assert compiled(jnp.ones((8, 8)))[0, 0] == 8


def test_what_the_user_set_wins_and_is_said() -> None:
    name = "xla_gpu_enable_latency_hiding_scheduler"
    chosen = choose("cuda", {"XLA_FLAGS": f"--xla_dump_to=/tmp/x --{name}=false"})
    assert name not in chosen.options
    assert len(chosen.options) == len(choose("cuda", {}).options) - 1
    assert chosen.notes[0] == f"XLA: {name}=false from XLA_FLAGS, not the preset's true"


def test_an_option_that_this_jaxlib_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = dict(PRESETS["cpu"])
    preset = {**known, "xla_gpu_lhs_enable_gpu_async_tracker": True, "xla_cpu_enable_fast_math": "perhaps"}
    monkeypatch.setattr(xla_options, "PRESETS", {"cpu": preset})
    chosen = choose("cpu", {})
    assert chosen.options == known
    assert len(chosen.notes) == 1 and chosen.notes[0].endswith(", ".join(list(preset)[1:]))


def test_choosing_again_costs_nothing() -> None:
    choose("gpu", {})
    started = time.perf_counter()
    choose("gpu", {})
    assert time.perf_counter() - started < 0.05


def test_an_unknown_platform_has_no_preset() -> None:
    assert choose("abacus", {}).options == {}
