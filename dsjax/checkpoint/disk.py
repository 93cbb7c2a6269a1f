"""Numbered Orbax checkpoints on disk: asynchronous, atomic, checked, restorable onto any mesh."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dsjax.checkpoint.chunks import save_args
from dsjax.checkpoint.digests import digests, verify
from dsjax.checkpoint.faults import disk_faults, hush_closed_loops
from dsjax.checkpoint.retention import superfluous
from dsjax.checkpoint.stored import (
    DELETED,
    META,
    STATE,
    free,
    metric_of,
    read_arrays,
    read_meta,
    remove,
    remove_checkpoints,
    steps_in,
    stored_arrays,
)
from dsjax.checkpoint.tree import check_matches, from_stored, to_stored
from dsjax.config.checkpoint import DiskConfig
from dsjax.errors import Damaged, InputError
from dsjax.mesh import named_leaves
from dsjax.processes import together

# Data files of this size are written while the next one is filled, and copied elsewhere in parallel.
_FILE_BYTES = 64 * 2**20


class DiskCheckpoints:
    """The checkpoints of one run.

    Args:
      directory: where they lie; made when first saved to.
      config: what is kept, and how it is written.

    Attributes:
      failed: the newest save failed, on this process or as far as it knows.
      held: tells the steps that may not be removed now, as they are being copied elsewhere.
      before_save: called with the step before anything of a save is written; what it raises fails the save.
    """

    def __init__(self, directory: str | Path, config: DiskConfig | None = None):
        self.directory = Path(directory).absolute()
        self.failed = False
        self.held: Callable[[], Collection[int]] = lambda: ()
        self.before_save: Callable[[int], None] = lambda step: None
        self._config = config or DiskConfig()
        self._writer: ocp.AsyncCheckpointer | None = None
        self._pending: int | None = None
        self._removal: threading.Thread | None = None

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, oldest first."""
        return steps_in(self.directory)

    def latest_step(self) -> int | None:
        """Step of the newest finished checkpoint."""
        return max(self.steps(), default=None)

    def has(self, step: int) -> bool:
        """Whether the checkpoint of a step is complete on disk."""
        return (self.directory / str(step) / STATE).is_dir()

    # ---- saving --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Makes the directory, so that one that cannot be written is refused before training.

        Raises:
          InputError: the directory cannot be made or written.
        """
        with disk_faults(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                probe = self.directory / ".writable"
                probe.write_bytes(b"x")
                probe.unlink()
                self._sweep()
        self._open()

    def _sweep(self) -> None:
        """Removes what a save or a removal that was cut short has left."""
        for path in self.directory.iterdir():
            number, dot, rest = path.name.partition(".")
            if number.isdecimal() and (dot + rest == DELETED or rest.startswith("orbax-checkpoint-tmp")):
                remove(path)

    def _open(self) -> ocp.AsyncCheckpointer:
        if self._writer is None:
            # Orbax warns about options that do not matter here, on every process.
            # What fails in the background is raised by `check` and `wait`, once, as a line.
            logging.getLogger("absl").setLevel(logging.CRITICAL)
            hush_closed_loops()
            arrays = ocp.PyTreeCheckpointHandler(use_compression=self._config.compression == "zstd")
            handlers = {STATE: arrays, META: ocp.JsonCheckpointHandler()}
            self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))
        return self._writer

    def save(
        self,
        step: int,
        state: Any,
        meta: Mapping[str, Any],
        metrics: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Starts saving; returns when the state has been copied off the devices.

        Args:
          meta: what is written beside the state, as JSON.
          metrics: what evaluations of this very state found, as {set: {metric: value}}.

        Raises:
          InputError, InternalError: this save could not start, or an earlier one failed.
        """
        self.wait()
        stored = to_stored(state)
        facts = {**meta, "metrics": _finite(metrics or {}), "digests": digests(stored)}
        arrays = ocp.args.PyTreeSave(
            stored,
            save_args=jax.tree.map(lambda leaf: save_args(), stored),
            ocdbt_target_data_file_size=_FILE_BYTES,
        )
        arguments = ocp.args.Composite(**{STATE: arrays, META: ocp.args.JsonSave(facts)})
        with self._noting_failure(), disk_faults(self.directory):
            self.before_save(step)
            self.directory.mkdir(parents=True, exist_ok=True)
            self._open().save(self.directory / str(step), args=arguments, force=True)
            self._pending = step

    def check(self) -> None:
        """Raises the error of a save that failed in the background; removes what is superfluous.

        Costs a look at the directory while a save is under way, else nothing.
        """
        if self._writer is not None and self._pending is not None:
            with self._noting_failure(), disk_faults(self.directory):
                self._writer.check_for_errors()
            self._settle()

    def wait(self) -> None:
        """Blocks until the save under way has finished, and raises its error if it failed."""
        if self._writer is not None:
            with self._noting_failure(), disk_faults(self.directory):
                self._writer.wait_until_finished()
            self._settle()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Remembers that a save failed: waiting for it would be waiting for processes that wait too."""
        try:
            yield
        except Exception:
            self.failed, self._pending = True, None
            if jax.process_index() == 0 and self.directory.is_dir():
                self._sweep()
            raise

    def recover(self) -> None:
        """Makes ready to save again after a save that failed; call it on all processes."""
        self.failed = False

    def _settle(self) -> None:
        """Once the save under way is complete: removes what is superfluous."""
        step = self._pending
        if step is None or not self.has(step):
            return
        self._pending = None
        if jax.process_index() == 0:
            with disk_faults(self.directory):
                self._prune()

    def _prune(self) -> None:
        best = self._config.best_metric if self._config.keep_best else None
        metrics = {s: metric_of(self.directory / str(s), best) if best else None for s in self.steps()}
        rules = (self._config.keep, self._config.keep_every, self._config.keep_best)
        remove_checkpoints(self.directory, set(superfluous(metrics, *rules)) - set(self.held()))
        # Files are freed at leisure, and never while the loop waits.
        if self._removal is None or not self._removal.is_alive():
            self._removal = threading.Thread(target=free, args=(self.directory,), name="removal")
            self._removal.start()

    def close(self) -> None:
        """Waits for the save under way and lets go of Orbax's threads."""
        if self._writer is not None:
            try:
                self.wait()
            finally:
                self._writer.close()
                self._writer = None
        if self._removal is not None:
            self._removal.join()

    # ---- restoring -----------------------------------------------------------------------------

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state saved at a step, placed as the abstract tree `like` says, and its metadata.

        Raises:
          InputError: no such checkpoint, or one of another model; Damaged: it cannot be read or is not as
            it was saved.
        """
        result, facts = self._read(step, to_stored(like), whole=True)
        facts.pop("digests", None)
        return from_stored(result, like), facts

    def _read(self, step: int, wanted: dict[str, Any], whole: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        path = self.directory / str(step)

        def read() -> tuple[dict[str, Any], dict[str, Any]]:
            facts, stored = self.facts(step), stored_arrays(path)
            considered = stored if whole else {name: stored[name] for name in wanted if name in stored}
            check_matches(considered, wanted, f"checkpoint {path}", "run.dir" if whole else "checkpoint")
            return read_arrays(path, wanted), facts

        result, facts = together(read)
        verify({name: result[name] for name in wanted}, facts.get("digests", {}), f"checkpoint {path}")
        return result, facts

    def facts(self, step: int) -> dict[str, Any]:
        """What was written beside the state of a step; `metrics` and `digests` among it.

        Raises:
          InputError: no such checkpoint; Damaged: it cannot be read.
        """
        stored = self.steps()
        if step not in stored:
            known = ", ".join(map(str, stored)) or "none"
            raise InputError(
                f"checkpoint {self.directory / str(step)} does not exist; steps stored there: {known}"
            )
        facts = read_meta(self.directory / str(step))
        if "digests" not in facts:
            raise Damaged(
                f"checkpoint {self.directory / str(step)}: what was written beside the state is not whole"
            )
        if facts.get("step", step) != step:
            raise Damaged(
                f"checkpoint {self.directory / str(step)} holds step {facts['step']}: its directory was renamed"
            )
        return facts

    def restore_part(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Some top-level parts of a saved state (their names are `like`'s keys), placed as in `like`.

        Raises:
          InputError: no such checkpoint, or one of another model; Damaged: it cannot be read or is not as
            it was saved.
        """
        result, _ = self._read(step, to_stored(dict(like)), whole=False)
        return {name: from_stored(result[name], like[name]) for name in like}


def _finite(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """What JSON can hold of the metrics."""
    return {name: {k: float(v) for k, v in one.items() if math.isfinite(v)} for name, one in metrics.items()}


def state_bytes(state: Any) -> int:
    """Bytes of a (concrete or abstract) state as stored, over all devices, each array once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in named_leaves(to_stored(state)).values())
