"""`dsjax launch --hosts`, with an ssh that runs everything here; Kubernetes and SLURM files; Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_local import ROOT, finish, start, wait_for
from test_supervisor import BEATS

from dsjax.errors import ConfigError
from dsjax.launch.hosts import passed_on, read_hosts

# What sshd does with the words: one line for a shell. A host `down` is not reached.
SSH = """#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
[ "$1" = down ] && { echo "ssh: connect to host down: No route to host" >&2; exit 255; }
echo "$1" >> "$SSH_LOG"
shift
cd /
exec env -i HOME=/ PATH=/usr/bin:/bin bash -c "$1"
"""
# The names of two hosts that are both here.
HERE = "127.0.0.1,localhost"
WORKS = (
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    "print('rank', rank, 'on', os.environ['DSJAX_NODE'], os.environ['DSJAX_NODES'], os.environ.get('JAX_SEEN'))\n"
    "open(f'up-{rank}', 'w').write(str(os.getpid()))\nwhile not os.path.exists('enough'): go(1)\n"
)


def over_ssh(directory: Path, hosts: str, code: str = WORKS, *options: str) -> subprocess.Popen[str]:
    programs = directory / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith("DSJAX_")},
        "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SSH_LOG": str(directory / "ssh.log"),
        "JAX_SEEN": "a b'c", "AWS_SECRET_ACCESS_KEY": "no",
    }  # fmt: skip
    words = [sys.executable, "-m", "dsjax", "launch", "--workers", "1", "--hosts", hosts, *options]
    return subprocess.Popen(
        [*words, "--", sys.executable, "-c", BEATS + code], cwd=directory, env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def up(directory: Path) -> list[int]:
    wait_for(lambda: all((p := directory / f"up-{r}").exists() and p.read_text() for r in range(2)))
    return [int((directory / f"up-{rank}").read_text()) for rank in range(2)]


def test_hosts_run_one_job_in_this_directory(tmp_path):
    process = over_ssh(tmp_path, HERE)
    up(tmp_path)
    (tmp_path / "enough").touch()
    code, out, err = finish(process)
    assert code == 0, out + err
    assert sorted((tmp_path / "ssh.log").read_text().split()) == ["127.0.0.1", "localhost"]
    assert "[127.0.0.1] dsjax launch: 2 nodes, 2 processes" in out
    assert "[127.0.0.1] [0] rank 0 on" in out and "[localhost] [1] rank 1 on" in out and "2 a b'c" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_here_stops_all_hosts(tmp_path, number):
    process = over_ssh(tmp_path, HERE)
    pids = up(tmp_path)
    process.send_signal(number)
    code, out, _ = finish(process)
    assert code == (75 if number != signal.SIGKILL else -signal.SIGKILL), out
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 15)


def test_a_host_that_is_not_reached_is_named_and_may_be_done_without(tmp_path):
    process = over_ssh(tmp_path, "127.0.0.1,down", WORKS, "--nodes", "1:2", "--rejoin-seconds", "0.5")
    wait_for((tmp_path / "up-0").exists)
    (tmp_path / "enough").touch()
    code, out, _ = finish(process)
    assert code == 0 and "No route to host" in out and "ssh to down (node 1) has failed" in out
    assert "1 nodes, 1 processes" in out


def test_hosts_are_read_from_a_list_or_a_file(tmp_path):
    (tmp_path / "hosts").write_text("a  # the first\n\nuser@b\n")
    assert read_hosts(str(tmp_path / "hosts")) == read_hosts("a,user@b") == ["a", "user@b"]
    for wrong in ("a,a", ",", "-oProxyCommand=x", "a b"):
        with pytest.raises(ConfigError, match="--hosts"):
            read_hosts(wrong)


def test_secrets_and_this_process_own_place_stay_here():
    here = {"JAX_PLATFORMS": "cpu", "PATH": "/bin", "PYTHONPATH": "/x", "DSJAX_DEBUG": "1"}
    others = {
        "AWS_SECRET_ACCESS_KEY": "x",
        "HOME": "/",
        "DSJAX_PROCESS_ID": "1",
        "DSJAX_NODE": "a",
        "MYPATH": "/",
    }
    assert passed_on({**here, **others}) == here


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--nodes", "3"], "does not fit the 2"), (["--node-rank", "0"], "leave out --node-rank")],
)
def test_what_does_not_go_together_is_refused(tmp_path, options, says):
    words = [
        sys.executable,
        "-m",
        "dsjax",
        "launch",
        "--workers",
        "1",
        "--hosts",
        "a,b",
        *options,
        "--",
        "train",
        "c",
    ]
    code, _, err = finish(start(tmp_path, words))
    assert code == 2 and says in err


def test_ray_that_is_not_installed_is_asked_for(monkeypatch):
    from dsjax.launch.ray import launch_on_ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"dsjax\[ray\]"):
        launch_on_ray(["train", "c.yaml"], nodes=2)
