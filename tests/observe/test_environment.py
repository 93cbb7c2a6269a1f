"""What is recorded of the machine, and the table of peaks."""

from __future__ import annotations

import json

import pytest

from dsjax.observe import environment, peak_flops


def test_it_is_json_with_versions_devices_and_host():
    found = json.loads(json.dumps(environment()))
    assert found["versions"]["jax"][0].isdigit() and found["devices"] >= 1 and found["memory_bytes"] > 2**28
    assert {"python", "platform", "device_kind", "host", "cpus", "processes", "commit"} <= set(found)


def test_only_variables_that_steer_jax_are_recorded(monkeypatch):
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HOME_SECRET"):
        monkeypatch.setenv(name, "a-secret-of-mine")
    monkeypatch.setenv("JAX_LOG_COMPILES", "0")
    found = environment()
    assert "a-secret-of-mine" not in json.dumps(found)
    assert found["variables"]["JAX_LOG_COMPILES"] == "0"


@pytest.mark.parametrize(
    ("kind", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H200", "float16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 156.0),
        ("NVIDIA GB200", "bfloat16", 2500.0),
        ("NVIDIA B200", "bfloat16", 2250.0),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("TPU v4", "bfloat16", 275.0),
        ("TPU v5 lite", "bfloat16", 197.0),
        ("TPU v5", "bfloat16", 459.0),
        ("TPU v5p", "bfloat16", 459.0),
        ("TPU v6 lite", "bfloat16", 918.0),
    ],
)
def test_known_chips(kind, dtype, tera):
    assert peak_flops(kind, dtype) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("cpu", "float32"), ("NVIDIA T1000", "bfloat16"), ("TPU v4", "float32"), ("TPU v4", "float16"),
     ("NVIDIA H100 80GB HBM3", "float64"), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16")],
)  # fmt: skip
def test_what_is_not_known_is_none(kind, dtype):
    assert peak_flops(kind, dtype) is None
