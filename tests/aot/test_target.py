"""Names of clusters, what is refused, which link a mesh axis uses, devices to compile for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax import aot
from dsjax.aot import target as targets
from dsjax.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "hosts", "each", "chip", "name"),
    [
        ("8xH100", 1, 8, "H100", "8xH100"),
        ("1x8xH100", 1, 8, "H100", "8xH100"),
        ("16x8xh100", 16, 8, "H100", "16x8xH100"),
        ("4x4xA100-40", 4, 4, "A100-40", "4x4xA100-40"),
        (" 2x8xB200 ", 2, 8, "B200", "2x8xB200"),
        ("cpu:8", 1, 8, "cpu", "cpu:8"),
        ("v5p:2x2x2", 2, 4, "v5p", "v5p:2x2x2"),
        ("v6e:4x4", 4, 4, "v6e", "v6e:4x4"),
        ("v5e:1x1", 1, 1, "v5e", "v5e:1x1"),
    ],
)
def test_names(text, hosts, each, chip, name):
    target = aot.parse_target(text)
    assert (target.hosts, target.devices_per_host, target.chip.name) == (hosts, each, chip)
    assert target.name == name
    assert aot.parse_target(target.name) == target


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xH10", "did you mean H100"),
        ("8xA100", "A100-80"),
        ("8xMI300", "known: "),
        ("H100", "for one node write 8xH100"),
        ("8", "is not the name of a cluster"),
        ("", "is not the name of a cluster"),
        ("2x2x8xH100", "no chip is called"),
        ("-8xH100", "is not the name of a cluster"),
        ("0x8xH100", "got 0"),
        ("999999999x8xH100", "devices, got"),
        ("8xv5p", "v5p:2x2x2"),
        ("8xcpu", "cpu:8"),
        ("H100:8", "8xH100"),
        ("cpu:2x4", "cpu:8"),
        ("cpu:", "cpu:8"),
        ("v5p:8", "2x2x2"),
        ("v5p:2xtwo", "2x2x2"),
    ],
)
def test_odd_names_are_refused_in_one_line(text, says):
    with pytest.raises(ConfigError) as refused:
        aot.parse_target(text)
    assert len(refused.value.faults) == 1
    assert says in refused.value.faults[0]


@pytest.mark.parametrize(
    ("name", "mesh", "axes", "inside"),
    [
        ("2x8xH100", {"data": 2, "fsdp": 8}, ["fsdp"], True),
        ("2x8xH100", {"data": 2, "fsdp": 8}, ["data"], False),
        ("2x8xH100", {"data": 2, "fsdp": 8}, ["data", "fsdp"], False),
        ("2x8xH100", {"data": 2, "fsdp": 8}, [], True),
        ("2x8xH100", {"fsdp": 8, "tensor": 2}, ["tensor"], True),
        ("2x8xH100", {"fsdp": 8, "tensor": 2}, ["fsdp"], False),
        ("2x8xH100", {"data": 4, "tensor": 4}, ["data"], False),
        ("8xH100", {"fsdp": 8}, ["fsdp"], True),
        ("18x4xGB200", {"fsdp": 72}, ["fsdp"], True),
        ("36x4xGB200", {"data": 2, "fsdp": 72}, ["fsdp"], True),
        ("36x4xGB200", {"data": 2, "fsdp": 72}, ["data"], False),
        ("v5p:4x4x4", {"fsdp": 64}, ["fsdp"], True),
        ("2x6xH100", {"data": 3, "tensor": 4}, ["tensor"], False),
    ],
)
def test_the_link_of_an_axis(name, mesh, axes, inside):
    target = aot.parse_target(name)
    assert target.link_of(mesh, axes) == (target.chip.node if inside else target.chip.network)


@pytest.mark.parametrize(
    ("name", "doubt"),
    [
        ("16xH100", "16xH100: one host of 16; H100 hosts have 8: write 2x8xH100 if these are 2 hosts"),
        ("2x16xH100", "2x16xH100: 2 hosts of 16; H100 hosts have 8: write 4x8xH100 if these are 4 hosts"),
        ("12xH100", "12xH100: one host of 12; H100 hosts have 8"),
        ("72xGB200", "72xGB200: one host of 72; GB200 hosts have 4: write 18x4xGB200 if these are 18 hosts"),
        ("2x8xH100", None),
        ("4xH100", None),
        ("cpu:64", None),
        ("v5p:4x4x4", None),
    ],
)
def test_hosts_of_more_gpus_than_there_are_in_one_are_doubted(name, doubt):
    assert aot.parse_target(name).doubt == doubt


def test_a_mesh_of_another_size_is_refused():
    target = aot.parse_target("2x8xH100")
    with pytest.raises(ConfigError, match="the mesh has 8 devices and 2x8xH100 has 16"):
        target.link_of({"fsdp": 8}, ["fsdp"])
    with pytest.raises(ConfigError, match="no axis fsd"):
        target.link_of({"fsdp": 16}, ["fsd"])


def test_simulated_devices_are_those_that_jax_has(cpu8):
    assert cpu8.devices() == jax.devices("cpu")[:8]
    with pytest.raises(ConfigError, match=r"runtime\.cpu_devices=4096"):
        aot.parse_target("cpu:4096").devices()


def test_missing_wheels_are_told_with_the_command(monkeypatch):
    monkeypatch.setattr(targets, "installed", lambda name: False)
    monkeypatch.setattr(targets, "cuda_plugin", lambda: None)
    monkeypatch.setattr(targets, "has_driver", lambda: False)
    with pytest.raises(ConfigError, match="pip install 'dsjax\\[aot\\]'"):
        aot.parse_target("8xH100").devices()
    with pytest.raises(ConfigError, match="libtpu"):
        aot.parse_target("v5p:2x2x2").devices()
    assert aot.missing_for("cpu") is None


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("name", ["2x4xA100-40", "8xH200", "2x4xGB200", "8xL40S"])
def test_devices_of_a_host_are_adjacent(name):
    target = aot.parse_target(name)
    devices = target.devices()
    assert len(devices) == 8
    assert {d.device_kind for d in devices} == {target.chip.xla.description}
    assert [d.process_index for d in devices] == [i // target.devices_per_host for i in range(8)]


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.skipif(
    jax.__version_info__ >= (0, 12),
    reason="XLA leaves a chip that it cannot compile for to that machine's driver",
)
def test_a_chip_too_new_for_the_compiler_is_refused_in_a_line(tmp_path):
    file = tmp_path / "chips.yaml"
    file.write_text("next: {extends: H100, xla: {capability: '99.0', description: 'the \"next\" {'}}")
    target = aot.parse_target("1xnext", aot.load_chips(file))
    sharding = NamedSharding(Mesh(target.devices(), ("x",)), P())
    argument = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    with pytest.raises(ConfigError, match="1xnext: the compiler for GPUs here does not take it"):
        aot.compile_for(target, aot.lower_for(target, lambda x: jnp.tanh(x) @ x, argument))
