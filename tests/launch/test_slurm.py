"""The job script on a real SLURM: a controller and two nodes of its own, all on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_elastic_job import BATCH, EVERY, Run, clean_environment, compare, report, slowly
from test_local import ROOT, wait_for
from test_nodes import free_port

from dsjax.launch.options import place

SCRIPT = ROOT / "configs/cluster/slurm.sbatch"
DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scancel", "scontrol")
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
NODES = ("127.0.0.1", "127.0.0.2")  # names that lead to this machine

CONF = """
ClusterName=dsjax
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={place}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
StateSaveLocation={place}/state
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmdSpoolDir={place}/spool-%n
SlurmdTimeout=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no SLURM here; None where there can."""
    absent = [name for name in (*DAEMONS, *COMMANDS) if shutil.which(name, path=SEARCH) is None]
    if absent:
        return f"takes {', '.join(absent)} (Debian: apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "takes root, whom SLURM's daemons run as"


class Slurm:
    """A controller and two nodes.

    Args:
      directory: a directory for all that they keep.
    """

    def __init__(self, directory: Path):
        self._directory, host = directory, socket.gethostname().partition(".")[0]
        (directory / "state").mkdir()
        for node in NODES:
            (directory / f"spool-{node}").mkdir()
        key = directory / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._conf = directory / "slurm.conf"
        ports = [free_port() for _ in range(3)]
        self._conf.write_text(CONF.format(host=host, place=directory, ports=ports, nodes=NODES))
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        files = {"key-file": key} | {
            f"{what}-file": directory / f"munge.{what}" for what in ("pid", "log", "seed")
        }
        options = [f"--{name}={path}" for name, path in files.items()]
        self._start(
            "munged", "munged", "--foreground", "--force", f"--socket={directory}/munge.socket", *options
        )
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self._start(node, "slurmd", "-D", "-c", "-N", node)

    def _start(self, name: str, program: str, *options: str) -> None:
        with (self._directory / f"{name}.output").open("wb") as output:
            self.daemons[name] = subprocess.Popen(
                [shutil.which(program, path=SEARCH) or program, *options], env=self.environment(),
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def environment(self, **more: str) -> dict[str, str]:
        return clean_environment(SLURM_CONF=str(self._conf), PATH=SEARCH, **more)

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=30)
        return done.stdout

    def is_ready(self) -> bool:
        return self.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(len(NODES))

    def submit(self, run: Run, *options: str, **more: str) -> Job:
        """Submits the job script as it is, with less of everything than it asks for."""
        _environment_of_nodes(run.directory)
        words = [
            *options,
            "--gpus-per-node=0",
            "--cpus-per-task=1",
            "--time=10",
            str(SCRIPT),
            str(run.config),
        ]
        done = subprocess.run(
            ["sbatch", "--parsable", *words], cwd=run.directory, env=self.environment(**more),
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return Job(self, run, done.stdout.strip())

    def lose(self, node: str) -> None:
        """Kills a node's daemon and all that runs under it: its link and its processes are gone."""
        self.daemons[node].kill()
        for process in _tasks(self._conf, node):
            with contextlib.suppress(psutil.NoSuchProcess):
                step = process.parent()
                if step is not None and step.name().startswith("slurmstepd"):
                    step.kill()
                process.kill()

    def end(self) -> None:
        self.ask("scancel", "--user=root")
        self.ask("scancel", "--user=root", "--signal=KILL")
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.ask("squeue", "-h").strip(), 15)
        for node in NODES:
            self.lose(node)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _tasks(conf: Path, node: str) -> list[psutil.Process]:
    """What was started on a node of this SLURM."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if (environment.get("SLURM_CONF"), environment.get("SLURMD_NODENAME")) == (str(conf), node):
                found.append(process)
    return found


def _environment_of_nodes(directory: Path) -> None:
    """The virtual environment that the script activates; in it each node finds a memory of its own."""
    programs = directory / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    command = programs / "dsjax"
    command.write_text(
        f"#!/bin/sh\nexport DSJAX_CHECKPOINT__MEMORY__PATH={directory}/memory-$SLURM_NODEID\n"
        f'exec {sys.executable} -m dsjax "$@"\n'
    )
    command.chmod(0o755)


class Job:
    """A job that was submitted."""

    def __init__(self, slurm: Slurm, run: Run, number: str):
        self._slurm, self._run, self.number = slurm, run, number

    def fact(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", self._slurm.ask("scontrol", "show", "job", self.number))
        return found[1] if found else ""

    def text(self) -> str:
        log = self._run.directory / f"slurm-{self.number}.log"
        return log.read_text() if log.exists() else ""

    def wait(self, state: str, seconds: float) -> None:
        try:
            wait_for(lambda: self.fact("JobState") == state, seconds)
        except AssertionError:
            pytest.fail(f"job is {self.fact('JobState')}, not {state}:\n{self.text()}")

    def signal(self, number: signal.Signals) -> None:
        self._slurm.ask("scancel", f"--signal={number.name.removeprefix('SIG')}", self.number)


def test_a_job_that_could_have_more_nodes_starts_with_one():
    task = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0",
        "SLURM_STEP_NODELIST": "gpu3", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0",
    }  # fmt: skip
    found = place("1:2", None, None, task)
    assert (found["min_nodes"], found["max_nodes"], found["node_rank"]) == (1, 2, 0)
    assert str(found["rendezvous"]).startswith("gpu3:")
    assert place(None, None, None, task) == {}


@pytest.fixture
def slurm(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        wait_for(cluster.is_ready, 30)
        yield cluster
    finally:
        cluster.end()


@pytest.mark.slow
def test_a_job_that_is_stopped_is_queued_again_and_goes_on(tmp_path, slurm, record_property):
    steps = 120
    run, twin = Run(tmp_path / "job", steps), Run(tmp_path / "twin", steps)
    twin.train_undisturbed(devices=1)
    job = slurm.submit(run, "--nodes=1", DSJAX_FAULT=slowly(steps, 0.1))
    wait_for(lambda: run.reached() >= 2 * EVERY, 120)
    # As SLURM itself does before the time limit: to the steps, not to the script.
    asked = time.time()
    job.signal(signal.SIGTERM)
    job.wait("PENDING", 60)
    pending = time.time()
    (stopped,) = run.events("preempted")
    assert job.fact("Restarts") == "1" and "Exited with exit code 75" in job.text()
    assert stopped["reason"] == "SIGTERM" and stopped["step"] < steps

    job.wait("COMPLETED", 240)
    assert job.fact("ExitCode") == "0:0" and job.fact("Restarts") == "1"
    (resumed,) = run.events("resumed")
    assert (resumed["tier"], resumed["step"]) == ("disk", stopped["step"])
    took = {"to save, end and be queued": pending - asked, "until it goes on": resumed["time"] - pending}
    took["difference of the last loss"] = compare(run, twin, steps)
    report(took, record_property)


@pytest.mark.slow
def test_a_job_of_two_nodes_goes_on_without_one_that_is_lost(tmp_path, slurm, record_property):
    steps = 150
    run = Run(tmp_path / "job", steps)
    job = slurm.submit(run, "--nodes=2", MIN_NODES="1", DSJAX_FAULT=slowly(steps, 0.1))
    wait_for(lambda: run.reached() >= 2 * EVERY + 2, 180)
    (started,) = run.events("started")
    assert started["processes"] == 2
    lost = time.time()
    slurm.lose(NODES[1])
    shutil.rmtree(run.directory / "memory-1")
    at = run.reached()

    job.wait("COMPLETED", 300)
    (resumed,) = run.events("resumed")
    assert resumed["tier"] == "memory" and resumed["processes"] == 1
    assert 0 <= at - resumed["step"] <= 2 * EVERY
    assert f"node 1 ({NODES[1]}) is gone" in job.text()
    assert [step for step, *_ in run.steps()] == list(range(1, steps + 1))
    assert all(batch.total() == len(batch) == BATCH for batch in run.examples().values())
    step = next(when for step, _, when in run.steps() if step > resumed["step"] and when > resumed["time"])
    report({"from the loss to the next step": step - lost}, record_property)
