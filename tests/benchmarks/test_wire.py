"""The benchmark of exchanges over a slow link: its link, its hosts' end, what it makes of their rounds."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("wire", "wire_host", "namespaces")


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = {name: sys.modules.pop(name, None) for name in NAMES}
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update({name: found for name, found in before.items() if found})


@pytest.fixture
def namespaces(module):
    found = module("namespaces")
    if why := found.missing():
        pytest.skip(why)
    return found


def there(name):
    """What is left of a namespace."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    return name in listed or Path("/etc/netns", name).exists()


# ---- hosts -----------------------------------------------------------------------------------------

PASS_ON = """
import os, socket, sys, time
sys.path.insert(0, os.environ["BENCHMARKS"])
from wire_host import sent
if os.environ["DSJAX_PROCESS_ID"] == "0":
    listening = socket.create_server((socket.gethostbyname(socket.gethostname()), 5000))
    link = listening.accept()[0]
    before, begun = sent(), time.perf_counter()
    link.sendall(bytes(1_000_000))
    link.recv(1)
    print(sent() - before, time.perf_counter() - begun)
else:
    while True:
        try:
            link = socket.create_connection(("10.77.0.1", 5000))
            break
        except OSError:
            time.sleep(0.05)
    left = 1_000_000
    while left:
        left -= len(link.recv(left))
    link.sendall(b"!")
"""


def test_the_link_is_as_slow_as_it_says_and_counts_what_crosses_it(namespaces, tmp_path):
    environ = {**os.environ, "BENCHMARKS": str(BENCHMARKS), "PYTHONPATH": str(BENCHMARKS.parent)}
    with namespaces.two_hosts(20) as hosts:
        namespaces.run_on(hosts, [sys.executable, "-c", PASS_ON], environ, tmp_path, timeout=60)
    count, seconds = map(float, (tmp_path / "0.log").read_text().split()[-2:])
    assert 1_000_000 < count < 1_100_000
    assert seconds > (1_000_000 - 2 * namespaces.BURST) * 8 / 20e6
    assert not any(there(host.name) for host in hosts)


def test_hosts_end_with_what_went_wrong(namespaces, tmp_path):
    code = (
        "import os, sys, time; os.environ['DSJAX_PROCESS_ID'] == '1' and sys.exit('no luck'); time.sleep(60)"
    )
    begun = time.monotonic()
    with (
        pytest.raises(namespaces.Failed, match="host 1 ended with 1: no luck"),
        namespaces.two_hosts(20) as hosts,
    ):
        namespaces.run_on(hosts, [sys.executable, "-c", code], os.environ, tmp_path, timeout=60)
    assert time.monotonic() - begun < 30
    assert not any(there(host.name) for host in hosts)


HOLD = """
import os, signal, sys, tempfile
from pathlib import Path
import namespaces
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell takes it away from what it starts behind `&`
with namespaces.as_interrupt(signal.SIGTERM), namespaces.two_hosts(20) as hosts:
    names = " ".join(host.name for host in hosts)
    say = [sys.executable, "-c", f"import os, time; print('{names}', flush=True); time.sleep(60)"]
    namespaces.run_on(hosts, say, os.environ, Path(sys.argv[1]), 60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_namespaces_and_processes_do_not_outlive_their_maker(namespaces, tmp_path, number):
    environ = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    maker = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], env=environ, stderr=subprocess.DEVNULL
    )
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    wait_for(lambda: all(log.exists() and log.read_text() for log in logs))
    names = logs[0].read_text().split()
    pids = [pid for name in names for pid in _processes(name)]
    assert len(pids) == 2
    maker.send_signal(number)
    assert maker.wait(timeout=30) != 0
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    if number == signal.SIGKILL:
        assert all(there(name) for name in names)
        namespaces.remove_orphans()
    assert not any(there(name) for name in names)


def _processes(name):
    return subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# ---- results ---------------------------------------------------------------------------------------


def host(*rounds):
    names = ("exchange_seconds", "exchange_bytes", "step_seconds", "step_bytes")
    facts = {"route": "flat", "relative_error": 0.1, "numbers": 9}
    return {**facts, "rounds": [dict(zip(names, each, strict=True)) for each in rounds]}


def test_a_round_is_as_slow_as_its_slower_host(module):
    wire = module("wire")
    part = wire.Part([wire.coded("dense"), wire.coded("int4")], 1, steps=True, rounds=3)
    dense = host((4.0, 800, 5.0, 1000), (8.0, 800, 9.0, 1000), (4.0, 800, 5.0, 1000))
    mine = host((1.0, 100, 2.0, 110), (1.0, 100, 2.0, 110), (1.0, 100, 2.0, 110))
    slower = host((0.9, 101, 2.5, 111), (2.0, 101, 2.5, 120), (0.9, 101, 2.5, 111))
    first, second = wire.figures(part, [[dense, mine], [dense, slower]])
    assert first["speedup_over_dense"] == first["ratio_to_dense_bytes"] == 1
    assert second["exchange_seconds"] == 1.0 and second["step_seconds"] == 2.5
    assert (second["wire_bytes"], second["exchange_bytes"]) == (111, 101)
    assert second["ratio_to_dense_bytes"] == pytest.approx(0.111)
    assert second["speedup_over_dense"] == 4.0 and second["step_speedup_over_dense"] == 2.0
    assert wire.table([first, second]).row_count == 2
    sparse = {**second, "codec": "topk_int4", "wire_bytes": 55.5}
    said = " ".join(wire.remarks({"cases": [first, second, sparse], "two_level": []}))
    assert "1/9.01" in said and "4.0 times as fast" in said and "0.50 of int4's bytes" in said


def test_without_root_all_is_listed_with_the_reason(module, monkeypatch, tmp_path, capsys):
    wire, answer = module("wire"), tmp_path / "wire.json"
    monkeypatch.setattr(wire.namespaces, "missing", lambda: "takes root, to make network namespaces")
    monkeypatch.setattr(sys, "argv", ["wire.py", "--json", str(answer)])
    assert wire.main() == 0
    found = json.loads(answer.read_text())
    codecs = [case["codec"] for case in found["cases"]]
    assert codecs == ["dense", "bfloat16", "int8", "int4", "e2m4", "topk", "topk_int4"]
    assert [case["route"] for case in found["two_level"]] == ["flat", "hierarchical", "hierarchical"]
    assert all("takes root" in case["skipped"] for case in found["cases"] + found["two_level"])
    assert "takes root" in capsys.readouterr().out


def test_what_is_missing_is_named(module, monkeypatch):
    namespaces = module("namespaces")
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert "tc of iproute2" in namespaces.missing()
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000, raising=False)
    assert "root" in namespaces.missing()


@pytest.mark.slow
def test_codes_cross_the_link(module, namespaces, tmp_path, monkeypatch):
    wire = module("wire")
    model = {
        **wire.LLAMA,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "head_dim": 16,
    }
    cases = [wire.coded("dense"), wire.coded("int4")]
    dense, int4 = wire.measure(wire.Part(cases, 1, steps=True, rounds=1), model)
    assert "skipped" not in dense, dense
    # Two hosts: each sends as many bytes as an fp32 gradient has, and a little more.
    assert 1 < dense["exchange_bytes"] / (4 * dense["parameters"]) < 1.2
    assert int4["ratio_to_dense_bytes"] < 0.2 and 0.1 < int4["relative_error"] < 0.25
    assert dense["relative_error"] < 1e-6 and int4["step_seconds"] > 0
