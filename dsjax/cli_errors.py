"""How the command line ends: every exception becomes plain lines on stderr and an exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from dsjax.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_INTERNAL,
    EXIT_OUT_OF_MEMORY,
    EXIT_PREEMPTED,
    DsjaxError,
)
from dsjax.train.signals import stop_outside_of_training

EXIT_INTERRUPTED = 128 + signal.SIGINT  # as a shell names the end by Ctrl-C
EXIT_BROKEN_PIPE = 128 + 13  # likewise by SIGPIPE

# Of one cause there may be a line for each tensor of a model.
_LINES = 21
_LESS_MEMORY = (
    "raise train.gradient_accumulation_steps, set train.remat=full, shard over more devices (mesh.fsdp) "
    "or shorten train.sequence_length"
)
# What the system says where the disk, not the program, is at fault, and what helps.
_ELSEWHERE = "put the run elsewhere (run.dir, data.cache_dir)"
_DISK_FAULTS = {
    errno.ENOSPC: f"the disk is full; free some space, or {_ELSEWHERE}",
    errno.EDQUOT: f"the disk quota is used up; free some space, or {_ELSEWHERE}",
    errno.EROFS: f"the file system is read-only; {_ELSEWHERE}",
    errno.EACCES: f"permission denied; get access, or {_ELSEWHERE}",
    errno.EPERM: f"permission denied; get access, or {_ELSEWHERE}",
}


def guarded(call: Callable[[], int | None]) -> int:
    """Run one verb; report what it raises and return the exit code of the process."""
    stop_outside_of_training()
    try:
        code = call() or EXIT_DONE
        sys.stdout.flush()
        return code
    except BaseException as error:  # the last line of defence; `describe` tells them apart
        return report(error)


def report(error: BaseException) -> int:
    """Tell the user of an exception, with a traceback only under DSJAX_DEBUG=1; return its exit code."""
    if _stdout_is_gone(error):
        return EXIT_BROKEN_PIPE
    lines, code = describe(error)
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], f"... and {len(lines) - _LINES + 1} more lines"]
    if _debugging() and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    _print(lines)
    return code


def leave(code: int) -> NoReturn:
    """End the process with `code`.

    One that failed ends at once: leaving jax.distributed in good order means to wait for the other processes,
    which in turn wait for this one's part of a collective, and threads of a save that failed or was
    interrupted may wait for each other for minutes.
    """
    if code not in (EXIT_DONE, EXIT_PREEMPTED):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def describe(error: BaseException) -> tuple[list[str], int]:
    """The lines that tell the user of an exception, and the exit code that goes with it."""
    if isinstance(error, DsjaxError):
        return error.faults, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ["interrupted; a run goes on from its last checkpoint"], EXIT_INTERRUPTED
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            return [error.code], EXIT_BAD_INPUT
        return [], error.code or EXIT_DONE
    if hasattr(error, "format_message"):
        return _usage(error), EXIT_BAD_INPUT
    for link in _chain(error):
        if _is_out_of_device_memory(link):
            said = f"out of device memory: {_first_line(link)}"
            return [f"{said}; {_LESS_MEMORY}"], EXIT_OUT_OF_MEMORY
        if _is_lost_peer(link):
            return [
                "another process of the job was lost, so this one cannot go on; its own log tells why; run the "
                f"same command again to go on from the last checkpoint ({_first_line(link)})"
            ], EXIT_INTERNAL
        disk = _disk_fault(link)
        if disk:
            return [disk], EXIT_BAD_INPUT
    if isinstance(error, MemoryError):
        said = "out of host memory; use a smaller batch, fewer data.workers or a smaller model"
        return [said], EXIT_INTERNAL
    if isinstance(error, ImportError):
        said = f"cannot import what is needed: {_first_line(error)}"
        return [f"{said}; dsjax doctor tells what is missing{_debug()}"], EXIT_INTERNAL
    return [f"internal error: {type(error).__name__}: {_first_line(error)}{_debug()}"], EXIT_INTERNAL


def _usage(error: Any) -> list[str]:
    """One line for what the parser of the command line refuses; none where it showed the help instead.

    typer's parser is click, which newer versions carry inside themselves: a usage error is known by its
    method, not by its type.
    """
    said = " ".join(error.format_message().split()).rstrip(".")
    if not said:
        return []
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "dsjax"
    verb = command.partition(" ")[2]
    return [f"{verb + ': ' if verb else ''}{said[0].lower()}{said[1:]} (see {command} --help)"]


def _debugging() -> bool:
    return os.environ.get("DSJAX_DEBUG") == "1"


def _debug() -> str:
    return "" if _debugging() else " (set DSJAX_DEBUG=1 for the traceback)"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and those it was raised from, nearest first."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_out_of_device_memory(error: BaseException) -> bool:
    # XLA's exception has had several names and homes; asking for it would import jax.
    return type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError") and "RESOURCE_EXHAUSTED" in str(
        error
    )


def _is_lost_peer(error: BaseException) -> bool:
    if type(error).__name__ not in ("XlaRuntimeError", "JaxRuntimeError", "ValueError"):
        return False
    said = str(error)
    return any(
        word in said for word in ("Gloo", "by peer", "ncclRemoteError", "heartbeat", "oordination service")
    )


def _disk_fault(error: BaseException) -> str:
    """What to tell of a disk that is full or may not be written; empty where it is not that."""
    if isinstance(error, OSError):
        advice = _DISK_FAULTS.get(error.errno or 0)
        # Without a name it need not be a file: a port below 1024, say, is denied alike.
        if advice and (error.filename or error.errno not in (errno.EACCES, errno.EPERM)):
            return f"{error.filename or 'a file'}: {advice}"
        return ""
    # Libraries written in C++ pass on the system's words without its number.
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        if os.strerror(number) in text:
            return f"{_DISK_FAULTS[number]} ({_first_line(error)})"
    return ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if len(text) <= 300 else text[:297] + "..."


def _stdout_is_gone(error: BaseException) -> bool:
    """Whether this is the error of writing to a stdout whose reader has closed it.

    If so, nothing more is written there.
    """
    if not any(isinstance(link, BrokenPipeError) for link in _chain(error)):
        return False
    if isinstance(error, SystemExit):  # rich has seen to it
        return True
    poll = select.poll()
    poll.register(sys.stdout, 0)
    gone = bool(poll.poll(0))  # asked for nothing, it tells of errors alone
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def _print(lines: list[str]) -> None:
    try:
        for fault in lines:
            for line in fault.splitlines() or [""]:
                print(f"dsjax: {line}", file=sys.stderr)
        sys.stderr.flush()
    except OSError:
        pass  # stderr is closed too: the exit code is all that is left to say


def on_cpu(do: Callable[[], int]) -> int:
    """Does something that reads arrays: on the CPU, alone, whatever the machine has."""

    def with_jax() -> int:
        from dsjax.backend.platform import setup
        from dsjax.config.schema import RuntimeConfig

        setup(RuntimeConfig(platform="cpu", distributed="none"))
        return do()

    return guarded(with_jax)
