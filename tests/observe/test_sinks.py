"""Trackers, with their real packages."""

from __future__ import annotations

import socket
import sys
import urllib.request

import pytest

from dsjax.config.schema import ObserveConfig
from dsjax.errors import ConfigError
from dsjax.observe import check_sinks, open_sinks
from dsjax.observe.sinks import scalars

RECORD = {"step": 10, "loss": 2.5, "mfu": None, "tokens_per_second": 100.0, "time": 1e9}
EVAL = {"step": 10, "eval": {"held out": {"loss": 3.5, "perplexity": float("inf")}}, "time": 1e9}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_none_is_asked_for(tmp_path):
    assert open_sinks(ObserveConfig(), tmp_path, enabled=True) == []


def test_a_process_that_does_not_write_opens_none(tmp_path):
    assert open_sinks(ObserveConfig(prometheus_port=free_port()), tmp_path, enabled=False) == []


def test_what_is_sent_is_finite_numbers():
    assert dict(scalars(RECORD)) == {"loss": 2.5, "tokens_per_second": 100.0}
    assert dict(scalars(EVAL)) == {"eval/held out/loss": 3.5}


def test_missing_packages_are_named_with_the_setting_and_the_cure(monkeypatch):
    for module in ("tensorboardX", "wandb", "prometheus_client"):
        monkeypatch.setitem(sys.modules, module, None)
    observe = ObserveConfig(tensorboard=True, wandb={"project": "p"}, prometheus_port=9000)
    with pytest.raises(ConfigError) as caught:
        check_sinks(observe)
    assert len(caught.value.faults) == 3
    for fault, setting in zip(
        caught.value.faults, ("tensorboard", "wandb.project", "prometheus_port"), strict=True
    ):
        assert fault.startswith(f"observe.{setting}:") and "dsjax[track]" in fault


def test_prometheus_serves_the_newest_values(tmp_path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    (sink,) = open_sinks(ObserveConfig(prometheus_port=port), tmp_path, enabled=True)
    sink.log({**RECORD, "step": 9, "loss": 9.0})
    sink.log(RECORD)
    sink.log(EVAL)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    assert "dsjax_step 10.0" in text and "dsjax_loss 2.5" in text
    assert 'dsjax_eval_loss{set="held out"} 3.5' in text and "mfu" not in text
    sink.close()
    open_sinks(ObserveConfig(prometheus_port=port), tmp_path, enabled=True)[
        0
    ].close()  # the port is free again


def test_a_port_that_is_taken_is_refused(tmp_path):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"observe.prometheus_port: {port} cannot be used"):
            open_sinks(ObserveConfig(prometheus_port=port), tmp_path, enabled=True)


def test_tensorboard_writes_event_files(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c  # noqa: F401  the package is whole

    (sink,) = open_sinks(ObserveConfig(tensorboard=True), tmp_path, enabled=True)
    sink.log(RECORD)
    sink.log(EVAL)
    sink.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, found = file.read_bytes(), {}
    while data:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        data = data[16 + length :]
    assert found["loss"] == (10, 2.5) and found["eval/held_out/loss"] == (10, 3.5)


def test_wandb_offline_keeps_one_id_a_run_directory(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    observe = ObserveConfig(wandb={"project": "p", "mode": "offline"})
    (tmp_path / "config.yaml").write_text("train:\n  steps: 10\n")
    for _ in range(2):
        (sink,) = open_sinks(observe, tmp_path, enabled=True)
        sink.log(RECORD)
        sink.close()
    identity = (tmp_path / "wandb-id").read_text().strip()
    runs = list((tmp_path / "wandb").glob(f"offline-run-*-{identity}"))
    assert runs and all(list(run.glob("*.wandb")) for run in runs)
