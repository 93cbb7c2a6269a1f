"""Sources to stores: tokenised once, in parallel, kept in the cache; an interrupted build goes on."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from dsjax.config.schema import DataConfig
from dsjax.data import cache
from dsjax.data.readers import Part, plan_parts
from dsjax.data.sources import MANIFEST, InputFile, Source, list_files
from dsjax.data.store import CHUNK, DOCUMENT, INDEX, Job, Store, part_names, token_dtype, write_part
from dsjax.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from dsjax.errors import InputError, InternalError, Preempted
from dsjax.files import write_atomically

_PART_BYTES, _PARTS = 4 << 20, 256
"""A part is of 4 MB, or larger where that gave more than 256 parts."""
_ALONE_BYTES = 4 << 20
"""Less than this is tokenised before worker processes would have started."""
_SECONDS_BETWEEN_LINES = 15.0


def prepared(source: Source, data: DataConfig, tokenizer: Tokenizer) -> Store:
    """The tokenised documents of a source, from the cache or made now.

    Raises:
      InputError: a file at fault, no documents, a built directory of another tokenizer, or a cache that
        cannot be written.
    """
    if source.built is not None:
        return _check_built(Store(source.built), source, tokenizer)
    files = list_files(source)
    key = cache.key(source.kind, source.field, cache.files_key(files), tokenizer.fingerprint)
    directory = cache.cache_root(data) / f"{source.kind}-{key}"
    if not (directory / MANIFEST).is_file():
        with cache.building(directory, source.name) as wanted:
            if wanted:
                try:
                    _build(source, files, tokenizer, directory)
                except InputError as error:
                    raise _of_the_set(error, source, files) from None
    return Store(directory)


def _check_built(store: Store, source: Source, tokenizer: Tokenizer) -> Store:
    if store.manifest["tokenizer"] != tokenizer.fingerprint:
        raise InputError(
            f"{source.setting}: {store.directory} was built with tokenizer "
            f"{store.manifest['tokenizer_name']}, not with {tokenizer.name}; set data.tokenizer to the former"
        )
    return store


def _of_the_set(error: InputError, source: Source, files: Sequence[InputFile]) -> InputError:
    """The error, with the evaluation set's name before faults of its files, which may be of another kind."""
    paths = tuple(f"{file.path}:" for file in files)
    if not source.of_evaluation or not all(fault.startswith(paths) for fault in error.faults):
        return error
    kind = f"its files are read as {source.kind}; {source.setting}.kind takes another"
    return InputError([f"{source.setting}: {fault} ({kind})" for fault in error.faults])


def _build(source: Source, files: list[InputFile], tokenizer: Tokenizer, directory: Path) -> None:
    total = sum(file.size for file in files)
    target = max(_PART_BYTES, total // _PARTS)
    groups = list(_grouped(plan_parts(source.kind, files, target), target))
    draft = directory.with_name(f"{directory.name}.partial")
    draft.mkdir(exist_ok=True)
    job = Job(draft, source.kind, source.field, files, groups, tokenizer.spec())
    there = sum(map(job.is_done, range(len(groups))))
    text = f"tokenising {source.name}: {cache.counted(len(files), 'file')}, {cache.sized(total)}"
    if there:
        text += f"; {there} of {len(groups)} parts are there"
    try:
        _tokenise(job, tokenizer, text)
    except KeyboardInterrupt:
        there = sum(map(job.is_done, range(len(groups))))
        raise Preempted(
            f"stopped while tokenising {source.name}: {there} of {len(groups)} parts are kept; run the same "
            "again to go on"
        ) from None
    except InputError:
        # What is done may be of use when the same is built again; an empty directory is not.
        if not any(map(job.is_done, range(len(groups)))):
            shutil.rmtree(draft, ignore_errors=True)
        raise
    _finish(source, job, tokenizer)
    draft.rename(directory)


def _tokenise(job: Job, tokenizer: Tokenizer, text: str) -> None:
    """Makes the parts that are not there yet, in processes of their own if it is worth starting them."""
    weights = [sum(part.weight for part in group) for group in job.groups]
    missing = [number for number in range(len(job.groups)) if not job.is_done(number)]
    work = sum(weights[number] for number in missing)
    with _progress(text, sum(weights), sum(weights) - work) as advance:
        if work > _ALONE_BYTES:
            workers = min(len(missing), _cores())
            _run_workers(job, missing, workers, lambda number: advance(weights[number]))
            return
        for number in missing:
            write_part(job, number, tokenizer)
            advance(weights[number])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _grouped(parts: Sequence[Part], target: int) -> Iterator[list[Part]]:
    group: list[Part] = []
    size = 0
    for part in parts:
        group.append(part)
        size += part.weight
        if size >= target:
            yield group
            group, size = [], 0
    if group:
        yield group


def _finish(source: Source, job: Job, tokenizer: Tokenizer) -> None:
    """Puts the parts' documents together and writes what the directory is.

    Raises:
      InputError: there is nothing to learn from.
    """
    names = [part_names(number) for number in range(len(job.groups))]
    counts = [json.loads((job.directory / name[2]).read_text()) for name in names]
    indices = [np.load(job.directory / name[1], allow_pickle=False) for name in names]
    documents = np.concatenate([np.empty(0, DOCUMENT), *indices])
    skipped = {reason: sum(count[reason] for count in counts) for reason in ("empty", "masked")}
    if not len(documents):
        shutil.rmtree(job.directory)
        raise InputError(f"{source.setting}: {_nothing(source, job, skipped)}")
    cache.write_array(job.directory / INDEX, documents)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.copy_to(job.directory / "tokenizer")
    manifest = {
        "format": cache.FORMAT,
        "kind": source.kind,
        "field": source.field,
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_name": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "chunk": CHUNK,
        "documents": len(documents),
        "tokens": sum(count["tokens"] for count in counts),
        "skipped": skipped,
        "digest": cache.key([count["digest"] for count in counts]),
        "parts": len(names),
        "files": [file.name for file in job.files],
    }
    for _, index, count in names:
        (job.directory / index).unlink()
        (job.directory / count).unlink()
    (job.directory / _JOB).unlink(missing_ok=True)
    for draft in job.directory.glob(".*"):  # of processes that were killed
        draft.unlink()
    write_atomically(job.directory / MANIFEST, json.dumps(manifest, indent=1).encode())


def _nothing(source: Source, job: Job, skipped: dict[str, int]) -> str:
    where = ", ".join(source.paths)
    if skipped["masked"]:
        return f"no conversation of {where} has a token of the assistant ({skipped['masked']} have none)"
    return f"no text in {where} (files: {len(job.files)}, empty documents: {skipped['empty']})"


# ---- worker processes

_JOB = "job.json"


def _run_workers(job: Job, numbers: Sequence[int], workers: int, on_done: Callable[[int], None]) -> None:
    """Tokenises parts in processes of their own; stops them all at the first fault or interrupt."""
    write_atomically(job.directory / _JOB, job.dump().encode())
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in numbers:
        todo.put(number)
    answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    processes = [_start_worker(job) for _ in range(workers)]
    threads = [threading.Thread(target=_feed, args=(p, todo, answers), daemon=True) for p in processes]
    try:
        for thread in threads:
            thread.start()
        for _ in numbers:
            number, answer = answers.get()
            if answer is None:
                raise InternalError(
                    "a process that tokenises ended without a word (out of memory?); run the same again to "
                    "go on"
                )
            if "faults" in answer:
                raise InputError(answer["faults"])
            on_done(number)
    finally:
        for process in processes:
            process.terminate()
        for process, thread in zip(processes, threads, strict=True):
            process.wait()
            thread.join()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(OSError):  # what was still to be sent to a process that is gone
                        stream.close()


def _start_worker(job: Job) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "dsjax.data.worker", str(job.directory / _JOB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _feed(process: subprocess.Popen[str], todo: Any, answers: Any) -> None:
    assert process.stdin is not None and process.stdout is not None
    number = -1
    try:
        while True:
            number = todo.get_nowait()
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answers.put((number, json.loads(line) if line else None))
            if not line:
                return
    except queue.Empty:
        process.stdin.close()
    except (OSError, ValueError):
        answers.put((number, None))


class _Lines:
    """Progress where there is no terminal: a line now, and one from time to time."""

    def __init__(self, text: str, total: int, done: int):
        self._total, self._done = total, done
        self._said = time.monotonic()
        cache.say(text)

    def advance(self, number: int) -> None:
        """Moves it on."""
        self._done += number
        if time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            cache.say(f"tokenising: {self._done / self._total:.0%}")


@contextmanager
def _progress(text: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, lines elsewhere; yields the function that moves it on by so many bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(text, total, done).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(text, total=total, completed=done)
        yield lambda advance: progress.advance(task, advance)
