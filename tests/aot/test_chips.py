"""The table of chips, and files that change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsjax.aot import load_chips
from dsjax.aot.target import target_config
from dsjax.errors import ConfigError


def chips_with(tmp_path: Path, text: str):
    file = tmp_path / "chips.yaml"
    file.write_text(text)
    return load_chips(file)


def test_every_chip_is_whole_and_plausible():
    chips = load_chips()
    assert {"A100-40", "A100-80", "H100", "H100-PCIe", "H200", "B200", "GB200", "L40S", "RTX4090"} <= set(
        chips
    )
    assert {"v5e", "v5p", "v6e", "cpu"} <= set(chips)
    for chip in chips.values():
        if chip.kind == "cpu":
            continue
        assert 1e13 < chip.flops("bf16") < 1e16, chip.name
        assert chip.flops("fp8") >= chip.flops("bf16") >= chip.flops("fp32") * 0.99, chip.name
        assert chip.node.bandwidth > chip.network.bandwidth > 1e9, chip.name
        assert chip.memory.bandwidth > chip.node.bandwidth, chip.name
        assert 15e9 < chip.memory.bytes < 200e9, chip.name
        assert (chip.xla is None) == (chip.kind == "tpu"), chip.name


def test_a_type_without_a_unit_runs_in_the_next_wider_one():
    chip = load_chips()["A100-80"]
    assert chip.flops("fp8") == chip.flops("bf16") == 312e12
    assert chip.flops("fp32") == 19.5e12
    assert chip.flops("f8e5m2") == chip.flops("bf16")
    assert load_chips()["H100"].flops("f8e4m3fn") == 1979e12
    assert chip.flops("s8") == 624e12


def test_fp32_products_run_as_tf32_where_the_chip_has_it_unless_they_are_to_be_exact():
    chips = load_chips()
    assert (chips["H100"].unit("f32"), chips["H100"].flops("f32")) == ("tf32", 494.5e12)
    assert (chips["H100"].unit("fp32"), chips["H100"].flops("fp32")) == ("fp32", 67e12)
    assert [chips[name].unit("f32") for name in ("cpu", "v5p")] == ["fp32", "bf16"]


def test_a_file_changes_a_link_and_keeps_the_rest(tmp_path):
    text = "H100:\n  network: {name: photonic, bandwidth: 400e9}\n"
    old, new = load_chips()["H100"], chips_with(tmp_path, text)["H100"]
    assert (new.network.name, new.network.bandwidth) == ("photonic", 400e9)
    assert new.network.latency == old.network.latency
    assert new.peak == old.peak
    assert new.node == old.node


def test_chips_that_extend_a_changed_one_change_with_it(tmp_path):
    chips = chips_with(tmp_path, "H100: {devices: 4}\nmine: {extends: H200, price: 1.5}\n")
    assert chips["H200"].devices == 4
    assert chips["mine"].devices == 4
    assert chips["mine"].memory == chips["H200"].memory
    assert (chips["mine"].name, chips["mine"].price) == ("mine", 1.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("H100: {wats: 3}", "H100.wats: unknown key (got 3); did you mean H100.watts? [FILE:1]"),
        ("H100:\n  watts: -3", "H100.watts: takes a number > 0, got -3 [FILE:2]"),
        ("H100: {watts: .nan}", "H100.watts: takes a number > 0, got .nan [FILE:1]"),
        ("H100: {devices: 8.5}", "H100.devices: takes an integer > 0, got 8.5 [FILE:1]"),
        ("H100: {kind: gup}", 'H100.kind: takes gpu, tpu or cpu, got "gup" [FILE:1]'),
        ("H100: {peak: {bf17: 1e12}}",
         "H100.peak.bf17: unknown key (got 1e12); did you mean H100.peak.bf16? [FILE:1]"),
        ("H100: {peak: {bf16: -1}}", "H100.peak.bf16: takes a number > 0, got -1 [FILE:1]"),
        ("H100: {memory: 80e9}", "H100.memory: takes a section (a mapping of keys), got 80e9 [FILE:1]"),
        ("H100: {node: {bandwidth: fast}}", 'H100.node.bandwidth: takes a number > 0, got "fast" [FILE:1]'),
        ("H100: {bandwidth: 1}",
         "did you mean H100.memory.bandwidth, H100.node.bandwidth or H100.network.bandwidth? [FILE:1]"),
        ("H100: {xla: {coers: 3}}", "H100.xla.coers: unknown key (got 3); did you mean H100.xla.cores? [FILE:1]"),
        ("H100: {xla: {capability: 9.0}}",
         'H100.xla.capability: takes a compute capability in quotes ("9.0"), got 9.0 [FILE:1]'),
        ("H100: {name: mine}", "H100.name: unknown key"),
        ("new: {vendor: me}", "new.kind: is missing; it takes gpu, tpu or cpu, or let the chip extend another "
         "(extends: H100) [FILE]"),
        ("new: {extends: H10}", "did you mean H100"),
        ("a: {extends: b}\nb: {extends: a}", "extends itself"),
        ("- H100", "takes chip names"),
        ("H100: 3", "H100: a chip takes a mapping of what differs, got 3 [FILE:1]"),
        ("H100: {a: [", "is not YAML"),
    ],
)  # fmt: skip
def test_what_a_chip_cannot_be_is_refused_in_a_line(tmp_path, text, says):
    with pytest.raises(ConfigError) as refused:
        chips_with(tmp_path, text)
    says = says.replace("FILE", str(tmp_path / "chips.yaml"))
    assert any(says in fault for fault in refused.value.faults), refused.value.faults
    assert all("chips.yaml" in fault and "nput should" not in fault for fault in refused.value.faults)


def test_what_others_inherit_is_told_once(tmp_path):
    with pytest.raises(ConfigError) as refused:
        chips_with(tmp_path, "H100: {network: {latency: -1}}\nmine: {extends: H200}\n")
    assert len(refused.value.faults) == 1 and "H100.network.latency" in refused.value.faults[0]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_chips(tmp_path / "absent.yaml")


def test_xla_is_told_the_memory_of_the_chip():
    chips = load_chips()
    for name in ("H100", "H200"):
        assert f"device_memory_size: {chips[name].memory.bytes} " in target_config(chips[name])
    assert "major: 8 minor: 9" in target_config(chips["L40S"])
    with pytest.raises(ConfigError, match="v5p"):
        target_config(chips["v5p"])
