"""XLA presets: a file a kind of chip, each option checked against this jaxlib, the user's own winning."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dsjax.aot import load_chips
from dsjax.backend import xla_options
from dsjax.backend.xla_options import Preset, choose, preset_for, presets
from dsjax.errors import ConfigError

LATENCY = "xla_gpu_enable_latency_hiding_scheduler"


def test_every_preset_is_whole() -> None:
    known = presets()
    assert {"cpu", "gpu", "tpu"} <= set(known)
    kinds = [kind for preset in known.values() for kind in preset.devices]
    assert len(kinds) == len(set(kinds))
    for name, preset in known.items():
        assert (preset.name, preset.version >= 1) == (name, True)
        assert set(preset.reasons) == set(preset.options)
        assert all(len(why) > 20 and "\n" not in why for why in preset.reasons.values()), name
        assert bool(preset.devices) == (name not in ("cpu", "gpu", "tpu"))


def test_a_chip_without_a_file_uses_its_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Preset("mine", 3, ("NVIDIA Mine",), {LATENCY: False}, {LATENCY: "measured on this one"})
    monkeypatch.setattr(xla_options, "presets", lambda: {**presets(), "mine": mine})
    assert preset_for("gpu", "NVIDIA Mine") is mine
    assert str(preset_for("cuda", "NVIDIA Other")).startswith("gpu, version ")
    assert preset_for("abacus") is None
    device = SimpleNamespace(device_kind="NVIDIA Mine")
    monkeypatch.setattr(xla_options, "_refused", lambda options, device: False)
    chosen = choose("gpu", {}, device=device)
    assert (chosen.preset, chosen.options) == ("mine, version 3", {LATENCY: False})


def test_an_option_that_is_not_for_a_layout_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_options, "_refused", lambda options, device: False)
    device, name = SimpleNamespace(device_kind="NVIDIA Other"), "xla_gpu_pipeline_all_gather"
    for mesh in (None, {"tensor": 1, "fsdp": 8}):
        assert name in choose("gpu", {}, device=device, mesh=mesh).options
    chosen = choose("gpu", {}, device=device, mesh={"tensor": 2, "fsdp": 4})
    assert name not in chosen.options
    assert f"XLA: {name} is not for meshes with tensor" in chosen.notes
    given = choose("gpu", {}, device=device, own={name: "x"}, mesh={"tensor": 2})
    assert given.options[name] == "x"


def test_the_presets_name_chips_as_the_table_of_chips_does() -> None:
    own = {"A100-40": "a100", "A100-80": "a100", "B200": "b200", "H100": "h100", "L40S": "l40s"}
    chips = [chip for chip in load_chips().values() if chip.xla]
    assert len(chips) > len(own)
    for chip in chips:
        preset = preset_for("gpu", chip.xla.description)
        assert preset is not None and preset.name == own.get(chip.name, "gpu")
    assert {*own.values()} == {name for name, preset in presets().items() if preset.devices}


def test_what_extends_another_adds_to_it() -> None:
    trees = {
        "base": {"version": 4, "options": {"a": {"value": 1, "why": "x"}, "b": {"value": 2, "why": "y"}}},
        "chip": {
            "version": 1,
            "extends": "base",
            "devices": ["C"],
            "options": {"b": {"value": 3, "why": "z"}},
        },
    }
    preset = xla_options._preset("chip", trees)
    assert preset == Preset("chip", 1, ("C",), {"a": 1, "b": 3}, {"a": "x", "b": "z"})


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_option_of_the_preset_is_one_that_this_jaxlib_takes(platform: str) -> None:
    chosen, preset = choose(platform, {}), presets()[platform]
    assert not chosen.notes
    older = {old: name for name, (old, _) in preset.older.items()}
    assert {older.get(name, name) for name in chosen.options} == set(preset.options)


def test_the_options_compile() -> None:
    chosen = choose("cpu", {})
    assert chosen.options and not chosen.notes
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile(compiler_options=chosen.options)
    assert compiled(jnp.ones((8, 8)))[0, 0] == 8


def test_what_the_user_set_wins_and_is_said() -> None:
    chosen = choose("cuda", {"XLA_FLAGS": f"--xla_dump_to=/tmp/x --{LATENCY}=false"})
    assert LATENCY not in chosen.options
    assert len(chosen.options) == len(choose("cuda", {}).options) - 1
    assert chosen.notes[0] == f"XLA: {LATENCY}=false from XLA_FLAGS, not the preset's true"


def test_what_is_given_wins_over_both_and_is_said() -> None:
    chosen = choose("cpu", {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}, own={
        "xla_cpu_enable_fast_math": True, "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INVALID"
    })  # fmt: skip
    assert chosen.options["xla_cpu_enable_fast_math"] is True
    assert chosen.options["xla_cpu_experimental_ynn_fusion_type"] == "LIBRARY_FUSION_TYPE_INVALID"
    assert len(chosen.notes) == 1 and "as given, not the preset's LIBRARY_FUSION_TYPE_DOT" in chosen.notes[0]


def test_what_is_given_must_be_right() -> None:
    wrong = {"xla_gpu_no_such_thing": 1, "xla_cpu_enable_fast_math": "perhaps", LATENCY: True}
    with pytest.raises(ConfigError) as refused:
        choose("cpu", {}, own=wrong)
    assert [line.partition(":")[0] for line in refused.value.faults] == list(wrong)[:2]


def test_an_option_that_this_jaxlib_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = dict(presets()["cpu"].options)
    options = {**known, "xla_gpu_lhs_enable_gpu_async_tracker": True, "xla_cpu_enable_fast_math": "perhaps"}
    monkeypatch.setattr(xla_options, "presets", lambda: {"cpu": Preset("cpu", 1, (), options, {})})
    chosen = choose("cpu", {})
    assert chosen.options == known
    assert len(chosen.notes) == 1 and chosen.notes[0].endswith(", ".join(list(options)[1:]))


def test_choosing_again_costs_nothing() -> None:
    choose("gpu", {})
    started = time.perf_counter()
    choose("gpu", {})
    assert time.perf_counter() - started < 0.05


def test_an_unknown_platform_has_no_preset() -> None:
    chosen = choose("abacus", {})
    assert (chosen.options, chosen.preset) == ({}, None)
