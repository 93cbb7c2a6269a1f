"""Every exception ends as plain lines and the exit code of its kind."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import jax
import pytest

import dsjax.errors
from dsjax.cli_errors import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, describe, guarded
from dsjax.config.messages import walk
from dsjax.errors import ConfigError, Diverged, InputError, InternalError, OutOfDeviceMemory, Preempted


def oom(text: str) -> Exception:
    return jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}")


def full(name: str | None = None) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", name)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a: b"), 2, "a: b"),
        (InputError("a: b"), 2, "a: b"),
        (Diverged("gave up"), 3, "gave up"),
        (InternalError("a peer is lost"), 70, "a peer is lost"),
        (OutOfDeviceMemory("too big"), 71, "too big"),
        (Preempted("saved"), 75, "saved"),
        (KeyboardInterrupt(), 130, "interrupted;"),
        (SystemExit("no"), 2, "no"),
        (ZeroDivisionError("division by zero"), 70, "internal error: ZeroDivisionError: division by zero"),
        (ValueError("\n\n first \n second"), 70, "internal error: ValueError: first (set DSJAX_DEBUG=1"),
        (ModuleNotFoundError("No module named 'x'"), 70, "cannot import what is needed: No module named 'x'"),
        (MemoryError(), 70, "out of host memory;"),
        (full("f"), 2, "f: the disk is full;"),
        (OSError(errno.EROFS, "Read-only file system", "f"), 2, "f: the file system is read-only;"),
        (PermissionError(errno.EACCES, "Permission denied", "f"), 2, "f: permission denied;"),
        # a port that may not be bound has no file name
        (PermissionError(errno.EACCES, "Permission denied"), 70, "internal error: PermissionError"),
        (caused(RuntimeError("save"), full("f")), 2, "f: the disk is full;"),
        (ValueError("zarr: No space left on device [x]"), 2, "the disk is full;"),
        (oom("8G"), 71, "out of device memory: RESOURCE_EXHAUSTED: 8G"),
        (caused(RuntimeError("step"), oom("8G")), 71, "out of device memory: RESOURCE_EXHAUSTED: 8G"),
        (jax.errors.JaxRuntimeError("Gloo all-reduce: Connection reset by peer"), 70, "another process of the job"),
        (jax.errors.JaxRuntimeError("INTERNAL: x"), 70, "internal error: JaxRuntimeError: INTERNAL: x"),
    ],
)  # fmt: skip
def test_an_exception_becomes_a_line_and_a_code(error, code, line):
    lines, found = describe(error)
    assert found == code
    assert len(lines) == 1 and lines[0].startswith(line)


def test_out_of_device_memory_says_what_would_fit():
    (line,), _ = describe(oom("allocating 8G"))
    for setting in ("train.gradient_accumulation_steps", "train.remat=full", "mesh.fsdp"):
        assert setting in line


def test_a_full_disk_is_told_by_name(capsys):
    def fill() -> None:
        with open("/dev/full", "w") as file:
            file.write("x")

    assert guarded(fill) == 2
    assert "the disk is full; free some space" in capsys.readouterr().err


def test_a_traceback_is_shown_only_on_request(capsys, monkeypatch):
    monkeypatch.delenv("DSJAX_DEBUG", raising=False)
    assert guarded(lambda: 1 // 0) == 70
    assert capsys.readouterr().err == (
        "dsjax: internal error: ZeroDivisionError: integer division or modulo by zero "
        "(set DSJAX_DEBUG=1 for the traceback)\n"
    )
    monkeypatch.setenv("DSJAX_DEBUG", "1")
    assert guarded(lambda: 1 // 0) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith("by zero\n")


def test_every_fault_has_a_line_of_its_own(capsys):
    def refuse() -> None:
        raise ConfigError(["a: one", "b: two"])

    assert guarded(refuse) == 2
    assert capsys.readouterr().err == "dsjax: a: one\ndsjax: b: two\n"
    assert guarded(lambda: None) == 0 and guarded(lambda: 7) == 7


DOCUMENT = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")


def test_the_document_lists_every_exit_code():
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", DOCUMENT, re.M)}
    known = {value for name, value in vars(dsjax.errors).items() if name.startswith("EXIT_")}
    assert listed == known | {EXIT_INTERRUPTED, EXIT_BROKEN_PIPE}


def test_the_document_names_keys_that_exist():
    keys = {key for key, _ in walk()}
    named = re.findall(r"`(\w+(?:\.\w+)+)(?:: \w+)?`", DOCUMENT)
    assert len(named) > 15
    assert [name for name in named if name not in keys and not name.endswith(".jsonl")] == []
