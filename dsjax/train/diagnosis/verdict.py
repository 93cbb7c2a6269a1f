"""What came first: readings put in the order of execution, and the first that is not finite, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsjax.models.calls import LOSS, number_in
from dsjax.train.diagnosis.taps import Point, Reading

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Readings:
    """What was read of one microbatch of B rows, on the host.

    Attributes:
      taps: point -> reading, in the order of execution.
      params: path -> whether it has a number that is not finite, bool []; [layers] of a stack.
      gradients: the same of the gradient.
      data: path of an array of the batch -> [B], above 0 where a row is not finite.
    """

    taps: Mapping[Point, Reading]
    params: Mapping[str, np.ndarray]
    gradients: Mapping[str, np.ndarray]
    data: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """The first operator whose inputs were finite and whose output was not.

    Attributes:
      direction: forward or backward.
      operator: path of the module, "" for the model itself; or "loss", "batch", or the path of a parameter.
      layer: its number; None: it is in none.
      place: the same in words.
      what: what of it is not finite.
      largest: the largest number that went in, forward or backward; None where nothing is known of it.
      rows: those of the microbatch that are not finite; none where all are.
    """

    direction: str
    operator: str
    layer: int | None
    place: str
    what: str
    largest: float | None = None
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        went_in = "input" if self.direction == FORWARD else "gradient of its output"
        largest = "" if self.largest is None else f"; largest {went_in} {self.largest:.2g}"
        return f"{self.place}: {self.what} not finite in the {self.direction} pass{largest}"


@dataclass(frozen=True)
class _At:
    """A point, in a layer of its stack."""

    point: Point
    layer: int | None
    reading: Reading


def first_bad(readings: Readings) -> Verdict | None:
    """What first was not finite; None: all is finite."""
    at = list(_in_order(readings.taps))
    return (
        _of_params(readings.params, "parameter", FORWARD)
        or _of_data(readings.data)
        or _forward(at)
        or _backward(at, readings.gradients)
    )


def _in_order(taps: Mapping[Point, Reading]) -> Iterator[_At]:
    """Points in the order of execution: those of a stack layer by layer."""
    stacks: dict[str, list[Point]] = {}
    for point in taps:
        if point.depth is not None:
            stacks.setdefault(str(point.stack), []).append(point)
    for point, reading in taps.items():
        if point.depth is None:
            if np.any(reading.seen):
                yield _At(point, point.layer, reading)
        elif stacks.get(str(point.stack)):
            members = stacks.pop(str(point.stack))
            for layer in range(point.depth):
                for one in members:
                    of_layer = Reading(*(leaf[layer] for leaf in taps[one]))
                    if of_layer.seen:
                        yield _At(one, layer, of_layer)


def _forward(at: list[_At]) -> Verdict | None:
    for one in at:
        bad = one.reading.bad
        if not np.any(bad):
            continue
        operator = one.point.parent if one.point.entry else one.point.path
        before = _entry(at, operator, one)
        what = f"input of {_own_name(one.point.path)}" if one.point.entry else "output"
        return _verdict(FORWARD, operator, one, what, before and before.reading.largest, bad)
    return None


def _backward(at: list[_At], gradients: Mapping[str, np.ndarray]) -> Verdict | None:
    owned = _owned(at, gradients)
    for one in reversed(at):
        bad, point = one.reading.bad_gradient, one.point
        if np.any(bad) and not point.entry and point.path != LOSS:
            operator = LOSS if point.parent is None else point.parent
            return _verdict(
                BACKWARD, operator, one, f"gradient of the output of {_own_name(point.path)}", None, bad
            )
        if np.any(bad):
            after = next((o for o in at if _same(o, one) and not o.point.entry), one)
            largest = after.reading.largest_gradient
            return _verdict(BACKWARD, point.path, one, "gradient of its input", largest, bad)
        for path in owned.get((point, one.layer), ()):
            if np.any(gradients[path] if point.depth is None else gradients[path][one.layer]):
                what = f"gradient of {path.removeprefix(f'{point.path}/')}"
                return _verdict(BACKWARD, point.path, one, what, None, np.zeros(0))
    return _of_params(gradients, "gradient", BACKWARD)


def _owned(at: list[_At], gradients: Mapping[str, Any]) -> dict[tuple[Point, int | None], list[str]]:
    """Point at which a module's backward is done -> paths of its own parameters."""
    done: dict[tuple[str, int | None], Point] = {}
    for one in reversed(at):
        done[one.point.path, one.layer] = one.point
    owned: dict[tuple[Point, int | None], list[str]] = {}
    for path in gradients:
        modules = [name for name, _ in done if path.startswith(f"{name}/")]
        owner = max(modules, key=len, default=None)
        for (name, layer), point in done.items():
            if name == owner:
                owned.setdefault((point, layer), []).append(path)
    return owned


def _entry(at: list[_At], path: str | None, inside: _At) -> _At | None:
    """Where a module was entered whose call, or a call in it, is at hand."""
    layer = _layer(path, inside)
    return next((o for o in at if o.point.entry and (o.point.path, o.layer) == (path, layer)), None)


def _same(one: _At, other: _At) -> bool:
    return (one.point.path, one.point.number, one.layer) == (
        other.point.path,
        other.point.number,
        other.layer,
    )


def _of_params(bad: Mapping[str, np.ndarray], what: str, direction: str) -> Verdict | None:
    for path, flags in bad.items():
        if np.any(flags):
            layer = int(np.argmax(flags)) if np.ndim(flags) else number_in(path)
            place = path if layer is None else f"layer {layer}, {path}"
            return Verdict(direction, path, layer, place, what)
    return None


def _of_data(data: Mapping[str, np.ndarray]) -> Verdict | None:
    for path, bad in data.items():
        if np.any(bad):
            return Verdict(FORWARD, "batch", None, f"the batch, {path}", "data", None, _some(bad))
    return None


def _verdict(direction: str, path: str | None, at: _At, what: str, largest: Any, bad: np.ndarray) -> Verdict:
    layer = _layer(path, at)
    # Of a module that is called in a loop of the model's own its readings are added up.
    several = np.any(np.asarray(at.reading.seen) > 1)
    largest = None if largest is None or several else float(largest)
    return Verdict(
        direction, path or "", layer, _place(path or "", layer, at.point.stack), what, largest, _some(bad)
    )


def _layer(path: str | None, at: _At) -> int | None:
    """The layer that a module is in which is called, or calls, at a point."""
    if at.point.stack is not None and f"{path}/".startswith(f"{at.point.stack}/"):
        return at.layer
    return number_in(path or "")


def _place(path: str, layer: int | None, stack: str | None) -> str:
    """A module in words: its layer, and its name inside of that."""
    if layer is None:
        return {LOSS: "the loss", "": "the model"}.get(path, path)
    parts = path.split("/")
    depth = parts.index(str(layer)) + 1 if stack is None else stack.count("/") + 1
    inside = "/".join(parts[depth:])
    return f"layer {layer}, {inside}" if inside else f"layer {layer}"


def _own_name(path: str) -> str:
    return path.rpartition("/")[2] or "the model"


def _some(bad: np.ndarray) -> tuple[int, ...]:
    """The rows that are not finite, unless all are."""
    rows = np.flatnonzero(bad)
    return () if len(rows) == len(bad) else tuple(map(int, rows))
