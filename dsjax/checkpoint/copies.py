"""A checkpoint's files to an object store and back, checked at both ends.

A copy of step N is the objects ``N/...``, named as on disk, and ``N/manifest.json``, written last: its
sizes and XXH3 checksums say what the others are.  Without it there is no copy.  While one is being sent,
``N/progress.json`` holds the same of what has arrived, from which a later try goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from dsjax.errors import ConfigError, Damaged, InputError

MANIFEST, PROGRESS = "manifest.json", "progress.json"
_PART = 8 * 2**20
_SAMPLE = 64 * 2**10
_PARALLEL = 4
_PROGRESS_SECONDS = 2.0


class Stopped(Exception):
    """The copy was broken off by its owner."""


@dataclass
class Pace:
    """Holds the sending back to so many bytes a second (None: no limit), and ends it when asked."""

    bytes_per_second: float | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0

    def take(self, num_bytes: int) -> None:
        """Waits until so many bytes may be sent.

        Raises:
          Stopped: the copy is to end.
        """
        wait = 0.0
        if self.bytes_per_second is not None:
            with self._lock:
                now = time.monotonic()
                begin = max(now, self._free_at)
                self._free_at = begin + num_bytes / self.bytes_per_second
                wait = begin - now
        if self.stop.wait(wait) if wait > 0 else self.stop.is_set():
            raise Stopped


@cache
def open_store(url: str, create: bool = False) -> Any:
    """The obstore store of a URL.

    Args:
      create: make the directory of a file:/// URL; a bucket has to be there.

    Raises:
      ConfigError: obstore is not installed, or it knows no such store.
    """
    try:
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise ConfigError(f"{url}: object stores need obstore; pip install 'dsjax[remote]'") from None
    try:
        if url.startswith("file://"):
            return LocalStore(url.removeprefix("file://"), automatic_cleanup=True, mkdir=create)
        patience: Any = {"max_retries": 3, "retry_timeout": _seconds(20)}
        waits: Any = {"connect_timeout": "10s", "timeout": "120s"}
        # obstore reads the other AWS_* variables itself, this one only where it is given no such options.
        waits["allow_http"] = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
        if url.startswith("memory:"):
            return from_url(url)
        return from_url(url, retry_config=patience, client_options=waits)
    except Exception as error:
        raise ConfigError(
            f"{url}: cannot be opened ({reason(error)}); s3://, gs://, az://, file:/// and memory:/// are known"
        ) from error


def _seconds(seconds: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


def reason(error: BaseException) -> str:
    """An error in one short line; of what a server answered, what it says in words."""
    said = re.search("<Message>(.*?)</Message>", str(error))
    text = said[1] if said else " ".join(str(error).split("\n\n")[0].split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def digest_of(path: Path) -> str:
    """XXH3 (64 bits) of a file, as 16 hexadecimal digits."""
    hasher = xxhash.xxh3_64()
    with path.open("rb") as stream:
        while block := stream.read(_PART):
            hasher.update(block)
    return hasher.hexdigest()


def files_of(directory: Path) -> dict[str, int]:
    """Sizes of all files below a directory, by their relative names."""
    files = (p for p in sorted(directory.rglob("*")) if p.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def stored_steps(store: Any) -> dict[int, bool]:
    """Steps that a store holds anything of; True: a whole copy."""
    import obstore

    names = obstore.list_with_delimiter(store)["common_prefixes"]
    steps = [int(n) for name in names if (n := name.rstrip("/").rpartition("/")[2]).isdecimal()]
    return {step: _there(store, f"{step}/{MANIFEST}") for step in sorted(steps)}


def _there(store: Any, name: str) -> bool:
    import obstore

    try:
        obstore.head(store, name)
    except FileNotFoundError:
        return False
    return True


def read_json(store: Any, name: str) -> dict[str, Any]:
    """A JSON object; {} where there is none."""
    import obstore

    try:
        found = json.loads(bytes(obstore.get(store, name).bytes()))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def manifest_of(store: Any, step: int, where: str) -> dict[str, Any]:
    """What a copy consists of: step, written (Unix time), bytes, files {name: {bytes, xxh3}}.

    Raises:
      InputError: there is no whole copy of this step.
    """
    manifest = read_json(store, f"{step}/{MANIFEST}")
    if not isinstance(manifest.get("files"), dict):
        raise InputError(f"{where}: holds no whole copy of step {step}")
    return manifest


def remove(store: Any, step: int) -> None:
    """Removes all of a step: the manifest first, so that what is left never counts."""
    import obstore

    with contextlib.suppress(FileNotFoundError):
        obstore.delete(store, f"{step}/{MANIFEST}")
    names = [entry["path"] for batch in obstore.list(store, prefix=str(step)) for entry in batch]
    if names:
        obstore.delete(store, names)


# ---- sending -----------------------------------------------------------------------------------


class _Sending:
    """One copy under way."""

    def __init__(self, store: Any, step: int, source: Path, pace: Pace):
        self.store, self.step, self.source, self.pace = store, step, source, pace
        self.arrived: dict[str, dict[str, Any]] = {}
        self.sent = 0
        self._lock = threading.Lock()
        self._noted = time.monotonic()

    def objects(self) -> dict[str, dict[str, Any]]:
        """What the store holds of this step: size and e_tag by name."""
        import obstore

        start = len(f"{self.step}/")
        batches = obstore.list(self.store, prefix=str(self.step))
        return {entry["path"][start:]: dict(entry) for batch in batches for entry in batch}

    def resume(self) -> bool:
        """Takes over what an earlier try has sent, where it is still there and still what is on disk.

        Returns:
          Whether this copy is whole already.
        """
        there, whole = self.objects(), {}
        for record in (MANIFEST, PROGRESS):
            if record in there:
                whole[record] = read_json(self.store, f"{self.step}/{record}").get("files", {})
        noted = {name: facts for files in whole.values() for name, facts in files.items()}
        for name, facts in noted.items():
            path = self.source / name
            if _same(there.get(name), facts) and path.is_file() and path.stat().st_size == facts["bytes"]:
                self.pace.take(0)
                if digest_of(path) == facts["xxh3"]:
                    self.arrived[name] = facts
        return bool(noted) and set(whole.get(MANIFEST, {})) == set(self.arrived) == set(files_of(self.source))

    def file(self, name: str, size: int) -> None:
        """Sends a file, read once: its checksum is that of the bytes that were sent."""
        import obstore

        hasher, key = xxhash.xxh3_64(), f"{self.step}/{name}"

        def blocks() -> Iterator[bytes]:
            with (self.source / name).open("rb") as stream:
                while block := stream.read(_PART):
                    self.pace.take(len(block))
                    hasher.update(block)
                    yield block

        if size <= _PART:
            self.pace.take(0)
            result = obstore.put(self.store, key, b"".join(blocks()), use_multipart=False)
        else:
            result = obstore.put(self.store, key, blocks(), chunk_size=_PART, max_concurrency=_PARALLEL)
        facts = {"bytes": size, "xxh3": hasher.hexdigest(), "e_tag": result["e_tag"]}
        with self._lock:
            self.arrived[name] = facts
            self.sent += size
            if time.monotonic() - self._noted > _PROGRESS_SECONDS:
                self.note()

    def note(self) -> None:
        """Writes down what has arrived."""
        import obstore

        self._noted = time.monotonic()
        obstore.put(self.store, f"{self.step}/{PROGRESS}", json.dumps({"files": self.arrived}).encode())

    def check(self) -> None:
        """Compares sizes and e_tags with what was sent, and a stretch of each file's bytes.

        Raises:
          OSError: they differ; what does counts as not sent.
        """
        there = self.objects()
        wrong = [n for n, facts in self.arrived.items() if not _same(there.get(n), facts)]
        rest = [n for n in self.arrived if n not in wrong]
        with ThreadPoolExecutor(_PARALLEL) as pool:
            wrong += [
                n for n, good in zip(rest, pool.map(self._sample_agrees, rest), strict=True) if not good
            ]
        for name in wrong:
            del self.arrived[name]
        if wrong:
            raise OSError(f"{wrong[0]} is not there as it was sent ({len(wrong)} such files)")

    def _sample_agrees(self, name: str) -> bool:
        import obstore

        size, digest = self.arrived[name]["bytes"], self.arrived[name]["xxh3"]
        if not size:
            return True
        self.pace.take(0)
        start = int(digest, 16) % max(1, size - _SAMPLE)
        length = min(_SAMPLE, size - start)
        with (self.source / name).open("rb") as stream:
            stream.seek(start)
            ours = stream.read(length)
        return bytes(obstore.get_range(self.store, f"{self.step}/{name}", start=start, length=length)) == ours


def _same(entry: dict[str, Any] | None, facts: dict[str, Any]) -> bool:
    """Whether an object is the one that was sent."""
    if entry is None or entry["size"] != facts["bytes"]:
        return False
    tags = entry["e_tag"], facts.get("e_tag")
    return None in tags or tags[0] == tags[1]


def send(store: Any, step: int, source: Path, pace: Pace | None = None) -> dict[str, int]:
    """Copies the checkpoint in `source` to a store; what an earlier try left there is used.

    Returns:
      bytes: of the checkpoint; sent: how many of them had to be sent.

    Raises:
      Stopped: the pace's owner ended it; FileNotFoundError: the checkpoint was removed meanwhile.
      Exception: as the store raises; try again.
    """
    import obstore

    copy, files = _Sending(store, step, source, pace or Pace()), files_of(source)
    if not files:
        raise FileNotFoundError(f"{source} holds no files")
    total = sum(files.values())
    if copy.resume():
        return {"bytes": total, "sent": 0}
    with contextlib.suppress(FileNotFoundError):
        obstore.delete(store, f"{step}/{MANIFEST}")
    missing = {name: size for name, size in files.items() if name not in copy.arrived}
    try:
        _in_parallel(lambda name: copy.file(name, missing[name]), list(missing))
        copy.check()
    except BaseException:
        if copy.arrived:
            with contextlib.suppress(Exception):
                copy.note()
        raise
    listed = {name: {"bytes": f["bytes"], "xxh3": f["xxh3"]} for name, f in sorted(copy.arrived.items())}
    manifest = {"step": step, "written": time.time(), "bytes": total, "files": listed}
    obstore.put(store, f"{step}/{MANIFEST}", json.dumps(manifest).encode())
    extra = [f"{step}/{name}" for name in copy.objects() if name not in files and name != MANIFEST]
    if extra:
        obstore.delete(store, extra)
    return {"bytes": total, "sent": copy.sent}


def _in_parallel(work: Callable[[Any], None], items: list[Any]) -> None:
    """Calls `work` on every item from a few threads; after an error begins no more and raises it."""
    with ThreadPoolExecutor(_PARALLEL) as pool:
        pending = [pool.submit(work, item) for item in items]
        try:
            for one in pending:
                one.result()
        except BaseException:
            for one in pending:
                one.cancel()
            raise


# ---- fetching ----------------------------------------------------------------------------------


def fetch(store: Any, step: int, to: Path, where: str) -> None:
    """Copies step `step` into the new directory `to`, which appears when all of it has been checked.

    Args:
      where: the store's URL, for messages.

    Raises:
      InputError: there is no whole copy; Damaged: it is not as it was sent.
      Exception: as the store or the file system raises.
    """
    manifest = manifest_of(store, step, where)
    draft = to.with_name(f"{to.name}.orbax-checkpoint-tmp")
    files = manifest["files"]
    strange = [name for name in files if name.startswith("/") or ".." in Path(name).parts]
    if strange:
        raise InputError(f"{where}: step {step} names a file outside of it: {strange[0]}")
    for name in set(files_of(draft)) - set(files):  # Of a save that was cut short.
        (draft / name).unlink()
    missing = [n for n, facts in files.items() if not _matches(draft / n, facts)]
    ranges = []
    for name in missing:
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        with (draft / name).open("wb") as stream:
            stream.truncate(files[name]["bytes"])
        ranges += [(name, start) for start in range(0, files[name]["bytes"], _PART)]
    _in_parallel(lambda part: _fetch_part(store, step, draft, part, files[part[0]]["bytes"], where), ranges)
    damaged = [name for name in missing if not _matches(draft / name, files[name])]
    if damaged:
        raise Damaged(f"{where}: the copy of step {step} is damaged: {damaged[0]} is not as it was sent")
    os.replace(draft, to)


def _matches(path: Path, facts: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == facts["bytes"] and digest_of(path) == facts["xxh3"]


def _fetch_part(store: Any, step: int, to: Path, part: tuple[str, int], size: int, where: str) -> None:
    import obstore

    name, start = part
    length = min(_PART, size - start)
    try:
        found = bytes(obstore.get_range(store, f"{step}/{name}", start=start, length=length))
    except FileNotFoundError:
        raise Damaged(f"{where}: the copy of step {step} is damaged: {name} is not there") from None
    with (to / name).open("r+b") as stream:
        stream.seek(start)
        stream.write(found)
