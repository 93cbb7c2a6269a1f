"""A node: its workers and its health, told what to do and asked how they are.

The leader speaks to its own node and to others alike: orders and statuses are JSON objects, which cross
a link or not.  An order never names a program: a node runs the command that it was started with.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsjax.launch.lines import is_local
from dsjax.launch.options import Options
from dsjax.launch.output import Output
from dsjax.launch.workers import Generation, Workers

# Above the port of the supervisors: those of the workers' coordinators, a new one each time.
PORTS = 64


class Node:
    """This node.

    Args:
      options: how the job is supervised.
      arguments: program and arguments of each worker.
      output: where their output goes.
      directory: for heartbeats, on a memory file system.
      address: where other nodes reach this one.
    """

    def __init__(self, options: Options, arguments: list[str], output: Output, directory: Path, address: str):
        self._options, self._output, self._address = options, output, address
        self.workers = Workers(arguments, options.workers, output, directory)
        self._key = ""
        self._health = Health(options)
        self._offset = 0
        self._port = self._free_port()

    def obey(self, order: dict[str, Any]) -> None:
        """Does what the leader says: start (a generation), signal (a number), stacks, kill."""
        match order.get("order"):
            case "start":
                generation = Generation(**order["generation"])
                self._key = generation.key
                self.workers.start(generation)
                self._port = self._free_port()
            case "signal":
                self.workers.signal(int(order["number"]), groups=bool(order.get("groups")))
            case "stacks":
                self.workers.ask_for_stacks()
            case "kill":
                self.workers.kill()

    def poll(self) -> None:
        """Looks at workers and health."""
        self.workers.poll()
        self._health.poll()

    def status(self) -> dict[str, Any]:
        """What the leader decides by."""
        return {
            "key": self._key,
            "address": self._address,
            "port": self._port,
            "ill": self._health.fault,
            "workers": [asdict(look) for look in self.workers.looks()],
        }

    def end(self) -> None:
        """Ends what still runs, at once, and waits for the last of its output."""
        self.workers.kill()
        self._health.close()
        self._output.settle(2.0)

    def _free_port(self) -> int:
        """A port for the coordinator of the next generation, should it be on this node."""
        base = self._options.port
        for _ in range(PORTS if base else 0):
            self._offset = self._offset % PORTS + 1
            port = base + self._offset
            if port < 65536 and _is_free(port):
                return port
        host = self._address if is_local(self._address) else ""
        with socket.create_server((host, 0)) as server:
            return int(server.getsockname()[1])


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False


class Health:
    """A command that is run again and again; once it fails, or takes too long, this node is ill.

    Attributes:
      fault: what is wrong, in words; "" while nothing is.
    """

    def __init__(self, options: Options):
        self._command, self._seconds = options.health, options.health_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._due = time.monotonic()
        self.fault = ""

    def poll(self) -> None:
        """Looks at the command, and starts it when due."""
        if self._command is None or self.fault:
            return
        now = time.monotonic()
        if self._process is None:
            if now >= self._due:
                self._due = now + self._seconds
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", self._command], stdin=subprocess.DEVNULL, start_new_session=True
                )
            return
        code = self._process.poll()
        if code is not None:
            self._process = None
            if code:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
                self.fault = f"--health {self._command!r} {how}"
        elif now >= self._due:
            self.close()
            self.fault = f"--health {self._command!r} did not end within {self._seconds:g} s"

    def close(self) -> None:
        """Ends a command that still runs."""
        if self._process is not None:
            self._process.kill()
            self._process = None
