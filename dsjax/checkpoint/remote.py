"""Copies of the checkpoints on disk in object stores, made while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dsjax.checkpoint import copies, ranged
from dsjax.checkpoint.digests import verify
from dsjax.checkpoint.stored import META
from dsjax.checkpoint.tree import check_matches, from_stored, to_stored
from dsjax.config.checkpoint import RemoteConfig
from dsjax.errors import Damaged, InputError
from dsjax.mesh import named_leaves
from dsjax.processes import together

# Seconds between tries of a copy that failed; the last one over and over.
_WAITS = (1.0, 5.0, 30.0, 120.0, 300.0)


class RemoteCheckpoints:
    """Copies in each of the stores of a config; one store knows nothing of another.

    Args:
      config: the stores, how many copies each keeps, and how fast they may be sent.

    Attributes:
      directory: the first store's URL.
      on_event: called from background threads with what happened: ``checkpoint_copied`` (url, step, seconds,
        bytes, sent), ``copy_failed`` (url, step, reason, tries), ``copy_abandoned`` (url, step, reason).

    Raises:
      ConfigError: a URL that no store takes, or obstore is not installed.
    """

    def __init__(self, config: RemoteConfig):
        self.directory = config.urls[0]
        self.on_event: Callable[..., None] = lambda kind, **told: None
        rate = None if config.bandwidth_mb is None else config.bandwidth_mb * 1e6
        self._stores = [_Store(self, url, config.keep, rate) for url in config.urls]

    def copy(self, step: int, path: Path) -> None:
        """Has a checkpoint on disk copied to each store, in the background; call it on process 0.

        A store that is busy takes the newest that was asked for when it is done.
        """
        for store in self._stores:
            store.ask(step, path)

    def forget_after(self, step: int) -> None:
        """Removes copies of later steps, whose past did not last; call it on process 0."""
        for store in self._stores:
            store.forget_after(step)

    def busy(self) -> set[int]:
        """Steps whose files on disk are still needed."""
        return {step for store in self._stores for step in store.wanted()}

    def listing(self) -> dict[str, list[dict[str, Any]]]:
        """The manifests of the copies in each store, by URL, oldest first.

        Raises:
          InputError: a store cannot be read.
        """
        return {store.url: [store.manifest(step) for step in store.steps()] for store in self._stores}

    def steps(self) -> list[int]:
        """The steps that are whole in any store, newest first.

        Raises:
          InputError: none was found, and a store could not be asked.
        """
        found: set[int] = set()
        unread = []
        for store in self._stores:
            try:
                found |= set(store.steps())
            except InputError as error:
                unread += error.faults
        if unread and not found:
            raise InputError(unread)
        return sorted(found, reverse=True)

    def newest(self) -> int | None:
        """The newest step that is whole in any store; raises as `steps` does."""
        return max(self.steps(), default=None)

    @property
    def ranged(self) -> bool:
        """Whether arrays can be read from every store as they lie there, without fetching all of a copy."""
        return all(ranged.kvstore(store.url) is not None for store in self._stores)

    def latest_step(self) -> int | None:
        """As `newest`."""
        return self.newest()

    def facts(self, step: int) -> dict[str, Any]:
        """What was written beside the state of a step.

        Raises:
          Damaged: no store has it whole, or none can be reached.
        """
        faults: list[str] = []
        for store in self._stores:
            try:
                return store.facts(step)
            except Damaged as error:
                faults += error.faults
        raise Damaged(faults)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state of a step, placed as the abstract tree `like` says; each process reads its own parts only.

        Raises:
          Damaged: no store has it undamaged; on all processes if on one.
          InputError: it is of another model.
        """
        facts, where = self.facts(step), f"copy of step {step}"
        wanted = to_stored(like)

        def read(store: _Store) -> dict[str, Any]:
            base = ranged.kvstore(store.url)
            assert base is not None
            copy = ranged.RangedCopy(base, step, f"{where} in {store.url}")
            arrays = copy.arrays()
            shapes = {n: jax.ShapeDtypeStruct(a.shape, a.dtype.numpy_dtype) for n, a in arrays.items()}
            check_matches(shapes, wanted, f"{where} in {store.url}")
            return copy.read(arrays, named_leaves(wanted))

        digests, faults = facts.pop("digests", {}), []
        for store in self._stores:
            try:
                result = together(partial(read, store))
                verify(result, digests, f"{where} in {store.url}")
                return from_stored(result, like), facts
            except Damaged as error:
                faults += error.faults
        raise Damaged(faults)

    def fetch(self, step: int, to: Path) -> None:
        """Copies a step into the new directory `to`, from the first store that has it undamaged.

        Raises:
          Damaged: no store has it whole, or none can be reached.
        """
        faults: list[str] = []
        to.parent.mkdir(parents=True, exist_ok=True)
        for store in self._stores:
            try:
                copies.fetch(store.store, step, to, store.url)
                return
            except InputError as error:
                faults += error.faults
            except Exception as error:
                faults.append(f"{store.url}: step {step} cannot be fetched ({copies.reason(error)})")
        raise Damaged(faults)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until all that was asked for is copied, at most so long; whether it is."""
        until = None if seconds is None else time.monotonic() + seconds
        return all(store.wait(None if until is None else until - time.monotonic()) for store in self._stores)

    def close(self, grace: float = 60.0) -> None:
        """Gives copies under way so many seconds more, then breaks them off; a later run goes on with them."""
        self.wait(grace)
        for store in self._stores:
            store.end()


class _Store:
    """One store and the thread that copies to it."""

    def __init__(self, owner: RemoteCheckpoints, url: str, keep: int, rate: float | None):
        self.url, self.store = url, copies.open_store(url, create=True)
        self._owner, self._keep = owner, keep
        self._pace = copies.Pace(rate)
        self._change = threading.Condition()
        self._asked: tuple[int, Path] | None = None
        self._doing: tuple[int, Path] | None = None
        self._forgotten: list[tuple[int, Path]] = []  # jobs, by identity
        self._thread: threading.Thread | None = None

    def steps(self) -> list[int]:
        """Steps of the whole copies, oldest first.

        Raises:
          InputError: the store cannot be read.
        """
        try:
            return [step for step, whole in copies.stored_steps(self.store).items() if whole]
        except Exception as error:
            raise InputError(
                f"{self.url}: cannot be read ({copies.reason(error)}); check checkpoint.remote.urls, the network and "
                "the credentials"
            ) from error

    def facts(self, step: int) -> dict[str, Any]:
        """What was written beside the state of a step.

        Raises:
          Damaged: it cannot be read.
        """
        try:
            found = copies.read_json(self.store, f"{step}/{META}/metadata")
        except Exception as error:
            raise Damaged(f"{self.url}: step {step} cannot be read ({copies.reason(error)})") from error
        if not found:
            raise Damaged(f"{self.url}: holds no copy of step {step}")
        return found

    def manifest(self, step: int) -> dict[str, Any]:
        """What a copy consists of, as `copies.manifest_of` tells."""
        return copies.manifest_of(self.store, step, self.url)

    def ask(self, step: int, path: Path) -> None:
        """Has a step copied next, in place of one that is still waiting."""
        with self._change:
            self._asked = step, path
            self._change.notify_all()
            if self._thread is None and not self._pace.stop.is_set():
                self._thread = threading.Thread(target=self._work, name=f"copy to {self.url}", daemon=True)
                self._thread.start()

    def forget_after(self, step: int) -> None:
        """Removes copies of later steps, one that is being made when it is done; a store that fails is told of."""
        with self._change:
            if self._asked is not None and self._asked[0] > step:
                self._asked = None
            if self._doing is not None and self._doing[0] > step:
                self._forgotten.append(self._doing)
        try:
            for later in copies.stored_steps(self.store):
                if later > step:
                    copies.remove(self.store, later)
        except Exception as error:
            told = f"{self.url}: copies after step {step} were not removed: {copies.reason(error)}"
            self._owner.on_event("copy_failed", url=self.url, step=step, reason=told, tries=1)

    def wanted(self) -> list[int]:
        with self._change:
            return [one[0] for one in (self._asked, self._doing) if one is not None]

    def wait(self, seconds: float | None) -> bool:
        with self._change:
            return self._change.wait_for(lambda: not (self._asked or self._doing), seconds)

    def end(self) -> None:
        """Breaks off what is under way."""
        self._pace.stop.set()
        with self._change:
            left, thread = self._asked or self._doing, self._thread
            self._asked = None
            self._change.notify_all()
        if left is not None:
            self._owner.on_event(
                "copy_abandoned", url=self.url, step=left[0], reason=f"{self.url}: no time left"
            )
        if thread is not None:
            thread.join(5.0)

    def _work(self) -> None:
        while not self._pace.stop.is_set():
            with self._change:
                self._change.wait_for(lambda: self._asked or self._pace.stop.is_set())
                self._doing, self._asked = self._asked, None
            try:
                if self._doing is not None:
                    self._copy(self._doing)
            finally:
                with self._change:
                    self._doing = None
                    self._change.notify_all()

    def _copy(self, job: tuple[int, Path]) -> None:
        """Tries until it is done, the files are gone, or the run ends; a newer one that is asked for goes first."""
        (step, path), begin, tries = job, time.monotonic(), 0
        while True:
            try:
                if any(one is job for one in self._forgotten):
                    return
                done = copies.send(self.store, step, path, self._pace)
                seconds = round(time.monotonic() - begin, 3)
                if any(one is job for one in self._forgotten):
                    copies.remove(self.store, step)
                    return
                self._owner.on_event("checkpoint_copied", url=self.url, step=step, seconds=seconds, **done)
                self._prune()
                return
            except copies.Stopped:
                return
            except Exception as error:
                if self._pace.stop.is_set():
                    return
                tries += 1
                told = f"{self.url}: {copies.reason(error)}"
                self._owner.on_event("copy_failed", url=self.url, step=step, reason=told, tries=tries)
                wait = _WAITS[min(tries, len(_WAITS)) - 1]
            with self._change:
                self._change.wait_for(lambda: self._asked or self._pace.stop.is_set(), wait)
                if self._asked or self._pace.stop.is_set() or not path.is_dir():
                    return

    def _prune(self) -> None:
        """Removes all but the newest copies, and the remains of older ones that never were whole."""
        steps = copies.stored_steps(self.store)
        whole = [step for step, is_whole in steps.items() if is_whole]
        kept = set(whole[-self._keep :])
        for step in steps:
            if step not in kept and step < max(kept, default=0):
                copies.remove(self.store, step)
