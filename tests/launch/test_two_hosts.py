"""Two network namespaces as two hosts, of which one is lost whole: its processes, its memory and its link."""

from __future__ import annotations

import importlib
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_elastic_job import EVERY, Host, Run, compare, hosts, in_time, recovery, report, slowly
from test_local import wait_for

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PORT = 61217  # free: nothing else runs in the namespaces

__all__ = ["hosts"]


@pytest.fixture
def namespaces(monkeypatch):
    """Two hosts that a link joins, and the tools to do without one of them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tools = importlib.import_module("namespaces")
    if why := tools.missing():
        pytest.skip(why)
    try:
        with tools.two_hosts(megabits=1000) as pair:
            yield tools, pair
    except tools.Failed as error:
        pytest.skip(f"no network namespaces here: {error}")


def cut_off(tools, host) -> None:
    """Ends a host: its link first, so that nobody is told of the rest."""
    subprocess.run(["ip", "-n", host.name, "link", "set", tools.DEVICE, "down"], check=True)
    found = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
    for pid in found.stdout.split():
        subprocess.run(["kill", f"-{signal.SIGKILL.value}", pid], capture_output=True)


@pytest.mark.slow
def test_one_of_two_hosts_is_lost_whole(tmp_path, namespaces, hosts, record_property):
    tools, pair = namespaces
    steps = 100
    run, twin = Run(tmp_path / "pair", steps), Run(tmp_path / "twin", steps)
    twin.train_undisturbed(devices=2)
    options = ["--nodes", "1:2", "--rendezvous", f"{pair[0].address}:{PORT}", "--rejoin-seconds", "3"]
    for rank, host in enumerate(pair):
        hosts[rank] = Host(run, rank, options, host.command([]), DSJAX_FAULT=slowly(steps, 0.1))
    wait_for(lambda: run.reached() >= 6 * EVERY + 2, 180)

    killed = time.time()
    cut_off(tools, pair[1])
    hosts[1].process.wait(10)
    shutil.rmtree(hosts[1].memory)
    at = run.reached()
    assert hosts[0].ends(240) == 0, hosts[0].text()

    (event,) = run.events("resumed")
    assert event["tier"] == "memory" and event["processes"] == 1 and 0 <= at - event["step"] <= 2 * EVERY
    assert "lost node 1" in hosts[0].text()
    took = recovery(run, hosts[0], killed, event["step"])
    took["difference of the last loss"] = compare(run, twin, steps)
    report(took, record_property)
    assert took["in all"] < in_time(40)
