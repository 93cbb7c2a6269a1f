"""Whatever a user trains on, as the loop takes it: batches from a number on, and what resuming needs."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from dsjax.data.training import TrainData
from dsjax.errors import InputError

_CANNOT_RESUME = (
    "a bare iterator cannot resume: a run that goes on from a checkpoint would start it again at its first "
    "batch; give a Grain data set to resume exactly"
)


class StepLoader(ABC):
    """Batches for a training loop.

    Attributes:
      notes: what the user should know, a line each; complete after `restore`.
      log_examples: called with a step and its batch's number, where examples are logged.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.log_examples: Callable[[int, int], None] | None = None

    @abstractmethod
    def iterate(self, start: int) -> Iterator[Any]:
        """Batches number `start` (from 0), `start` + 1, ..."""

    def examples(self, batch: int) -> list[str]:
        """Ids of the examples in this process's part of a batch, as far as they are known."""
        return []

    def state(self, step: int) -> Any:
        """What `restore` needs beside the number of the next batch, as JSON can hold it; or None."""
        return None

    def restore(self, saved: Any, start: int) -> None:  # noqa: B027  most need no more than the number
        """Prepares to go on at batch `start`, with what `state` returned then (None: nothing saved).

        Raises:
          InputError: what was saved is not of this loader.
        """


def as_step_loader(loader: Any) -> StepLoader:
    """`loader` as the loop takes it.

    Args:
      loader: `TrainData`; a grain.MapDataset of batches, whose order is its index; a grain.IterDataset, its
        iterator or a grain.DataLoader, which resumes from its iterator's own state; or an iterator, an
        iterable or a function that returns one, which cannot resume.

    Raises:
      InputError: it is none of these.
    """
    if isinstance(loader, StepLoader):
        return loader
    if isinstance(loader, TrainData):
        return _TrainDataLoader(loader)
    if "grain" in sys.modules:
        import grain

        if isinstance(loader, grain.MapDataset):
            return _MapLoader(loader)
        if isinstance(loader, grain.IterDataset | grain.DataLoader | grain.DatasetIterator):
            return _StatefulLoader(loader)
    if callable(loader) or hasattr(loader, "__iter__") or hasattr(loader, "__next__"):
        return _BareLoader(loader)
    raise InputError(f"loader: takes a Grain data set or an iterable of batches, got {type(loader).__name__}")


class _TrainDataLoader(StepLoader):
    def __init__(self, data: TrainData):
        super().__init__()
        self._data = data
        self.notes = data.describe()
        self.log_examples = data.log_examples

    def examples(self, batch: int) -> list[str]:
        return self._data.example_ids(batch)

    def iterate(self, start: int) -> Iterator[Any]:
        return self._data.iterate(start)

    def state(self, step: int) -> Any:
        tokenizer = self._data.tokenizer
        return {
            "kind": "data",
            "fingerprint": self._data.fingerprint,
            "tokenizer": tokenizer.fingerprint,
            "tokenizer_name": tokenizer.name,
        }

    def restore(self, saved: Any, start: int) -> None:
        if not start:
            return
        told = saved if isinstance(saved, dict) and saved.get("kind") == "data" else {}
        tokenizer = self._data.tokenizer
        if told and told["tokenizer"] != tokenizer.fingerprint:
            raise InputError(
                f"data.tokenizer: {tokenizer.name} is not the one that the checkpoint was trained with "
                f"({told['tokenizer_name']}); its tokens would mean something else to the model. Set "
                "data.tokenizer to the latter, with --allow-config-change"
            )
        if told.get("fingerprint") != self._data.fingerprint:
            self.notes.append(
                "data: not what the checkpoint was trained on (documents changed): the run goes on at batch "
                f"{start} of the new order, so examples may come again or be missed"
            )


class _MapLoader(StepLoader):
    """A data set of batches by number: the number is all there is to know."""

    def __init__(self, batches: Any):
        super().__init__()
        self._batches = batches

    def iterate(self, start: int) -> Iterator[Any]:
        import grain

        if start >= len(self._batches):
            return
        # Few ahead: they are whole batches, not small records.
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
        batches = iter(self._batches.to_iter_dataset(options, allow_nones=True))
        batches.set_state({"next_index": start})
        try:
            for number, batch in enumerate(batches, start):
                if batch is None:
                    raise InputError(
                        f"loader: batch {number} was filtered out, so batches cannot be told by number; "
                        "filter before batch(), or give to_iter_dataset() of it"
                    )
                yield batch
        finally:
            batches.close()


class _StatefulLoader(StepLoader):
    """A Grain pipeline that can only be read in order, and says where it is."""

    def __init__(self, loader: Any):
        super().__init__()
        self._loader = loader
        self._batches: Any = None
        self._saved: Any = None

    def iterate(self, start: int) -> Iterator[Any]:
        self._batches = iter(self._loader)
        if self._saved is not None:
            try:
                self._batches.set_state(_unpacked(self._saved))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise InputError(f"loader: is not the one that was saved ({_first_line(error)})") from None
        try:
            yield from self._batches
        finally:
            getattr(self._batches, "close", lambda: None)()

    def state(self, step: int) -> Any:
        if self._batches is None:
            return self._saved
        state, processes = self._batches.get_state(), _process_count()
        binary = isinstance(state, bytes)
        return {
            "kind": "iterator",
            "processes": processes,
            "binary": binary,
            "state": state.decode() if binary else json.loads(json.dumps(state, default=_plain)),
        }

    def restore(self, saved: Any, start: int) -> None:
        if not start:
            return
        if not isinstance(saved, dict) or saved.get("kind") != "iterator":
            raise InputError(
                "loader: the checkpoint holds no state of a Grain iterator to go on from; give the loader "
                "that it was trained with"
            )
        if saved["processes"] != _process_count():
            raise InputError(
                f"loader: its state was saved with {saved['processes']} processes, and there are "
                f"{_process_count()}; start as many, or give a grain.MapDataset, which does not care"
            )
        self._saved = saved


class _BareLoader(StepLoader):
    def __init__(self, batches: Any):
        super().__init__()
        self._given = batches
        self.notes = [_CANNOT_RESUME]

    def iterate(self, start: int) -> Iterator[Any]:
        given = self._given
        return iter(given() if callable(given) and not hasattr(given, "__iter__") else given)

    def restore(self, saved: Any, start: int) -> None:
        if start:
            self.notes = [f"{_CANNOT_RESUME} (this run goes on at batch {start})"]


def _unpacked(saved: dict[str, Any]) -> Any:
    return saved["state"].encode() if saved["binary"] else saved["state"]


def _plain(value: Any) -> Any:
    """NumPy's numbers as JSON's."""
    return value.tolist()


def _process_count() -> int:
    import jax

    return jax.process_count()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
