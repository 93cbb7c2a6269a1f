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
def test_this_jaxlib_takes_the_whole_preset(platform: str) -> None:
    chosen = choose(platform, {})
    assert chosen.options == dict(PRESETS[platform]) and not chosen.notes


def test_the_options_compile() -> None:
    chosen = choose("cpu", {})
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile(compiler_options=chosen.options)
    assert compiled(jnp.ones((8, 8)))[0, 0] == 8


def test_what_the_user_set_wins_and_is_said() -> None:
    name = "xla_gpu_enable_pipelined_all_gather"
    chosen = choose("cuda", {"XLA_FLAGS": f"--xla_dump_to=/tmp/x --{name}=false"})
    assert name not in chosen.options and len(chosen.options) == len(PRESETS["gpu"]) - 1
    assert chosen.notes == [f"XLA: {name}=false from XLA_FLAGS, not the preset's true"]


def test_an_option_that_this_jaxlib_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = dict(PRESETS["cpu"])
    preset = {**known, "xla_gpu_lhs_enable_gpu_async_tracker": True, "xla_cpu_enable_fast_math": "perhaps"}
    monkeypatch.setattr(xla_options, "PRESETS", {"cpu": preset})
    chosen = choose("cpu", {})
    assert chosen.options == known
    assert [note.split()[1] for note in chosen.notes] == list(preset)[1:]


def test_choosing_again_costs_nothing() -> None:
    choose("gpu", {})
    started = time.perf_counter()
    choose("gpu", {})
    assert time.perf_counter() - started < 0.05


def test_an_unknown_platform_has_no_preset() -> None:
    assert choose("abacus", {}).options == {}
