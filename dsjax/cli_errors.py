"""How the command line ends: every exception becomes plain lines on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from dsjax.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_INTERNAL,
    EXIT_OUT_OF_MEMORY,
    EXIT_PREEMPTED,
    DsjaxError,
)

EXIT_INTERRUPTED = 128 + signal.SIGINT  # as a shell names the end by Ctrl-C
EXIT_BROKEN_PIPE = 128 + 13  # likewise by SIGPIPE

_LESS_MEMORY = (
    "raise train.gradient_accumulation_steps, set train.remat=full, shard over more devices (mesh.fsdp) "
    "or shorten train.sequence_length"
)
# What the system says where the disk, not the program, is at fault, and what helps.
_DISK_FAULTS = {
    errno.ENOSPC: "the disk is full; free some space, or put the run elsewhere (run.dir, data.cache_dir)",
    errno.EDQUOT: "the disk quota is used up; free some space, or put the run elsewhere (run.dir, data.cache_dir)",
    errno.EROFS: "the file system is read-only; choose a place that can be written (run.dir, data.cache_dir)",
    errno.EACCES: "permission denied; choose a place that this user may use (run.dir, data.cache_dir)",
    errno.EPERM: "permission denied; choose a place that this user may use (run.dir, data.cache_dir)",
}


def guarded(call: Callable[[], int | None]) -> int:
    """Run one verb; report what it raises and return the exit code of the process."""
    try:
        code = call() or EXIT_DONE
        sys.stdout.flush()
        return code
    except BaseException as error:  # noqa: BLE001  the last line of defence; `describe` tells them apart
        if isinstance(error, BrokenPipeError) and _stdout_is_gone():
            return EXIT_BROKEN_PIPE
        lines, code = describe(error)
        if os.environ.get("DSJAX_DEBUG") == "1" and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        _report(lines)
        return code


def leave(code: int) -> NoReturn:
    """End the process with `code`.

    A process of a cluster that failed ends at once: leaving jax.distributed in good order means to
    wait for the other processes, which in turn wait for this one's part of a collective.
    """
    if code not in (EXIT_DONE, EXIT_PREEMPTED) and _in_a_cluster():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _in_a_cluster() -> bool:
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()


def describe(error: BaseException) -> tuple[list[str], int]:
    """The lines that tell the user of an exception, and the exit code that goes with it."""
    if isinstance(error, DsjaxError):
        return error.faults, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ["interrupted; nothing was saved by this call since its last checkpoint"], EXIT_INTERRUPTED
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            return [error.code], EXIT_BAD_INPUT
        return [], error.code or EXIT_DONE
    for link in _chain(error):
        if _is_out_of_device_memory(link):
            said = f"out of device memory: {_first_line(link)}"
            return [f"{said}; {_LESS_MEMORY}"], EXIT_OUT_OF_MEMORY
        disk = _disk_fault(link)
        if disk:
            return [disk], EXIT_BAD_INPUT
    if isinstance(error, MemoryError):
        return [
            "out of host memory; use a smaller batch, fewer data.workers or a smaller model"
        ], EXIT_INTERNAL
    debug = "" if os.environ.get("DSJAX_DEBUG") == "1" else " (set DSJAX_DEBUG=1 for the traceback)"
    return [f"internal error: {type(error).__name__}: {_first_line(error)}{debug}"], EXIT_INTERNAL


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


def _disk_fault(error: BaseException) -> str:
    """What to tell of a disk that is full or may not be written; empty where it is not that."""
    if isinstance(error, OSError):
        advice = _DISK_FAULTS.get(error.errno or 0)
        return f"{error.filename or 'a file'}: {advice}" if advice else ""
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


def _stdout_is_gone() -> bool:
    """Whether the reader of stdout has closed it; if so, nothing more is written there."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _report(lines: list[str]) -> None:
    try:
        for fault in lines:
            for line in fault.splitlines() or [""]:
                print(f"dsjax: {line}", file=sys.stderr)
        sys.stderr.flush()
    except OSError:
        pass  # stderr is closed too: the exit code is all that is left to say
