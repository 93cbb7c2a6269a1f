"""`dsjax launch`: the supervisor of this node, from its start to its exit code."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import filelock

from dsjax.launch.follower import Follower
from dsjax.launch.lines import is_local
from dsjax.launch.node import Node
from dsjax.launch.nodes import Hub
from dsjax.launch.options import Options, program
from dsjax.launch.output import Output
from dsjax.launch.signals import Signals
from dsjax.launch.supervisor import Supervisor

# Set where whoever started the supervisor holds its stdin: when that ends, the job is to stop.
WATCH_STDIN = "DSJAX_LAUNCH_STDIN"
# Heartbeats are files that live in memory, where writing them never waits for a disk.
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _LOCK = "dsjax-launch-", ".lock"
_BEGUN_SECONDS = 60
_ROOM_BYTES = 1 << 20  # far more than the records and stacks of a node's workers take


def launch(options: Options, command: Sequence[str]) -> int:
    """Runs a command as the processes of one job, starts them again when they fail, returns the exit code.

    Each process finds its place in DSJAX_COORDINATOR, DSJAX_NUM_PROCESSES and DSJAX_PROCESS_ID, its share
    of the GPUs in DSJAX_LOCAL_DEVICE_IDS, and which start of the job this is in DSJAX_ATTEMPT.  Its output
    goes to the terminal, each line behind its rank, and to ``launch-logs/TIME/rank-N.log``.  SIGTERM and
    Ctrl-C are passed on, and the processes have the time they need to save.

    A worker that a signal ends, that ends with 1 or 70, or that hangs ends them all, and all start again.
    Other codes are the job's.

    Args:
      options: workers, nodes and patience.
      command: a verb of dsjax and its arguments, or another program and its.

    Returns:
      0; 75 where they stopped after saving; the code of a failure that is final, or that came too often
      (128 + N where signal N ended the worker, 70 where it hung); 70 where too few nodes are left.

    Raises:
      InputError: there is no such program, or the logs cannot be written.
      ConfigError: the rendezvous is taken, or refuses this node.
      InternalError: the leader was not reached, or has gone.
    """
    arguments = program(command)
    several = options.max_nodes > 1
    output = Output(f"-node-{options.node_rank}" if several else "")
    directory, lock = _own_directory()
    name = options.name or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        node = Node(options, arguments, output, directory, _address(options))
        with Signals().received() as signals:
            if os.environ.pop(WATCH_STDIN, None):
                threading.Thread(target=_stop_with_stdin, daemon=True).start()
            try:
                return _led_by(options, node, name, output, signals)
            finally:
                node.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.release()


def _room(root: Path) -> bool:
    """Whether heartbeats can be written there: it may be read-only, or full."""
    try:
        with tempfile.NamedTemporaryFile(dir=root) as probe:
            probe.write(bytes(_ROOM_BYTES))
        return True
    except OSError:
        return False


def _own_directory() -> tuple[Path, filelock.FileLock]:
    """A new directory for heartbeats, and the lock that says that its supervisor lives.

    Those of supervisors that were killed are removed: a lock ends with its process, in whatever container.
    """
    elsewhere = Path(tempfile.gettempdir())
    # Wherever they found room then.
    for left in (*_SHARED_MEMORY.glob(f"{_PREFIX}*"), *elsewhere.glob(f"{_PREFIX}*")):
        old = filelock.FileLock(left / _LOCK)
        with contextlib.suppress(OSError, filelock.Timeout):
            if left.stat().st_uid != os.getuid():
                continue
            if not (left / _LOCK).exists():
                # Of one that was killed before it held the lock, unless it is about to.
                if time.time() - left.stat().st_mtime > _BEGUN_SECONDS:
                    left.rmdir()
            else:
                with old.acquire(blocking=False):
                    shutil.rmtree(left, ignore_errors=True)
    root = _SHARED_MEMORY if _room(_SHARED_MEMORY) else elsewhere
    while True:
        directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        lock = filelock.FileLock(directory / _LOCK)
        # Between making the lock's file and holding it, another supervisor may take the directory for a dead one's.
        with contextlib.suppress(OSError, filelock.Timeout):
            lock.acquire(blocking=False)
            if (directory / _LOCK).exists():
                return directory, lock


def _stop_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _led_by(options: Options, node: Node, name: str, output: Output, signals: Signals) -> int:
    if options.node_rank > 0:
        return Follower(options, node, name, output).run(signals)
    hub = Hub(options, node, name)
    code = Supervisor(options, hub, output).run(signals)
    hub.close(code)
    return code


def _address(options: Options) -> str:
    """Where workers on other nodes reach a coordinator on this one."""
    if options.node_rank == 0 or is_local(options.host):
        return options.host
    with socket.socket(
        socket.AF_INET6 if ":" in options.host else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        try:
            # Sends nothing: it only asks which of this host's addresses leads there.
            probe.connect((options.host, options.port))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
