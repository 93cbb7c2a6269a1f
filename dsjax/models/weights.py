"""Which tensors of a Hugging Face model a parameter of ours is made of, and the way back, bit for bit.

An entry names a parameter, a tensor, and how their dimensions correspond: `d n h -> (n h) d`, ours on the left.
Letters in brackets are one dimension, the first of them outermost.  From this follows which box of a tensor a box
of a parameter needs, so that one layer or one device's slice can be read alone.  Nothing here knows of files.
"""

from __future__ import annotations

import itertools
import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from dsjax.errors import InputError

Box = tuple[tuple[int, int], ...]
"""[start, stop) of each dimension."""
Get = Callable[[str, Box], Any]
"""An array's part: ``get(name, box)``."""


@dataclass(frozen=True)
class Entry:
    """A parameter and the tensor that it is, or is a part of.

    Attributes:
      path: the parameter's, "layers/attention/q_proj/kernel".
      tensor: the tensor's name; fields in braces, "model.layers.{layer}.weight", number the parameter's leading
        dimensions, in their order.
      pattern: how the other dimensions correspond, "ours -> theirs"; one side alone where both are the same.
      sizes: extent of letters that brackets on our side leave open, and of those that ours is padded along, which has
        a dimension of its own then.
      part: (dimension, start, extent) of the tensor where it holds more than this parameter: the parameter's part
        begins at `start`.
      first: number of the tensor that the first layer has.
    """

    path: str
    tensor: str
    pattern: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    part: tuple[int, int, int] | None = None
    first: int = 0


@dataclass(frozen=True)
class Piece:
    """A box of a parameter that comes from one box of a tensor.

    Attributes:
      tensor, box: what is read.
      place: where it goes in what was asked for.
      convert: what was read -> what goes there.
    """

    tensor: str
    box: Box
    place: Box
    convert: Callable[[Any], Any]


class _Mapped:
    """An entry whose parameter's shape is known."""

    def __init__(self, entry: Entry, shape: Sequence[int]):
        self.entry, self.shape = entry, tuple(shape)
        fields = [name for _, name, _, _ in string.Formatter().parse(entry.tensor) if name]
        self.fields, self.stack, inner = fields, self.shape[: len(fields)], self.shape[len(fields) :]
        ours, _, theirs = entry.pattern.partition("->")
        self.ours, self.theirs = _groups(ours), _groups(theirs or ours)
        self.sizes = dict(entry.sizes)
        for group, extent in zip(self.ours, inner, strict=True):
            open_letters = [letter for letter in group if letter not in self.sizes]
            if open_letters:
                known = math.prod(self.sizes.get(letter, 1) for letter in group)
                self.sizes[open_letters[0]] = extent // known
        self.inner = tuple(math.prod(self.sizes[letter] for letter in group) for group in self.ours)

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        whole = [math.prod(self.sizes[letter] for letter in group) for group in self.theirs]
        if self.entry.part:
            dimension, _, whole[dimension] = self.entry.part
        return tuple(whole)

    def indices(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Indices of the stacked dimensions in a box of them."""
        return itertools.product(*(range(*span) for span in box))

    def name(self, index: Sequence[int]) -> str:
        numbers = dict(zip(self.fields, index, strict=True))
        if "layer" in numbers:
            numbers["layer"] += self.entry.first
        return self.entry.tensor.format(**numbers)

    def moved(self, box: Box) -> Box:
        """A box of the parameter's part of the tensor as one of the tensor."""
        if not self.entry.part:
            return box
        dimension, start, _ = self.entry.part
        return tuple((a + start, b + start) if i == dimension else (a, b) for i, (a, b) in enumerate(box))

    def pieces(self, box: Box) -> Iterator[Piece]:
        """The pieces of a box of the parameter; padding is in none of them."""
        lead, inner = box[: len(self.stack)], box[len(self.stack) :]
        real = tuple((min(a, n), min(b, n)) for (a, b), n in zip(inner, self.inner, strict=True))
        if any(a == b for a, b in real):
            return
        theirs, convert = _across(self.ours, self.theirs, self.sizes, real)
        for index in self.indices(lead):
            at = [(i - a, i - a + 1) for i, (a, _) in zip(index, lead, strict=True)]
            inside = [(0, b - a) for a, b in real]
            yield Piece(self.name(index), self.moved(theirs), (*at, *inside), convert)

    def back(self, index: Sequence[int], get: Get) -> tuple[Box, Any]:
        """(box of the tensor, what stands there) of one tensor of the stack."""
        box = (*((i, i + 1) for i in index), *((0, n) for n in self.inner))
        array = np.asarray(get(self.entry.path, box)).reshape(self.inner)
        whole = [math.prod(self.sizes[letter] for letter in group) for group in self.theirs]
        _, convert = _across(self.theirs, self.ours, self.sizes, tuple((0, n) for n in whole))
        return self.moved(tuple((0, n) for n in whole)), convert(array)


class WeightMap:
    """The entries of a model of these shapes.

    Args:
      entries: more than the model has do no harm: those of parameters that it lacks are left out.
      shapes: of all its parameters, by path.
      ignored: patterns of names of tensors that hold nothing of the model (buffers, copies).
      prefix: what names of tensors begin with, and may also do without.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        shapes: Mapping[str, Sequence[int]],
        ignored: Sequence[str] = (),
        prefix: str = "",
    ):
        self.shapes = {path: tuple(shape) for path, shape in shapes.items()}
        self.ignored, self.prefix = tuple(ignored), prefix
        self._of: dict[str, list[_Mapped]] = {}
        self._tensors: dict[str, list[tuple[_Mapped, tuple[int, ...]]]] = {}
        for entry in entries:
            if entry.path in self.shapes:
                mapped = _Mapped(entry, self.shapes[entry.path])
                self._of.setdefault(entry.path, []).append(mapped)
                for index in mapped.indices(tuple((0, n) for n in mapped.stack)):
                    self._tensors.setdefault(mapped.name(index), []).append((mapped, index))
        missing = self.shapes.keys() - self._of.keys()
        if missing:
            raise ValueError(f"no entry for {', '.join(sorted(missing))}")

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors."""
        return {name: holders[0][0].extent for name, holders in self._tensors.items()}

    def entries(self, path: str) -> list[Entry]:
        """Those of a parameter."""
        return [mapped.entry for mapped in self._of[path]]

    def stacked(self, path: str) -> int:
        """How many leading dimensions of a parameter number its tensors."""
        return len(self._of[path][0].stack)

    def pieces(self, path: str, box: Box | None = None) -> list[Piece]:
        """What a parameter, or a box of it, is made of."""
        box = box or tuple((0, n) for n in self.shapes[path])
        return [piece for mapped in self._of[path] for piece in mapped.pieces(box)]

    def parameter(self, path: str, get: Get, box: Box | None = None) -> np.ndarray:
        """A parameter, or a box of it, from parts of tensors; its padding is 0."""
        box = box or tuple((0, n) for n in self.shapes[path])
        made: np.ndarray | None = None
        for piece in self.pieces(path, box):
            part = piece.convert(np.asarray(get(piece.tensor, piece.box)))
            if made is None:
                made = np.zeros([b - a for a, b in box], part.dtype)
            place = tuple(slice(*span) for span in piece.place)
            made[place] = part.reshape([b - a for a, b in piece.place])
        if made is None:  # of padding alone; any tensor of the parameter tells the type
            name, whole = self._of[path][0].name([0] * len(self._of[path][0].stack)), self.tensors
            dtype = np.asarray(get(name, tuple((0, 1) for _ in whole[name]))).dtype
            made = np.zeros([b - a for a, b in box], dtype)
        return made

    def tensor(self, name: str, get: Get) -> np.ndarray:
        """A tensor from parts of parameters, without their padding."""
        made: np.ndarray | None = None
        for mapped, index in self._tensors[name]:
            box, part = mapped.back(index, get)
            if made is None:
                made = np.zeros(mapped.extent, part.dtype)
            made[tuple(slice(*span) for span in box)] = part
        assert made is not None
        return made

    def from_theirs(self, tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """All parameters from all tensors.

        Raises:
          InputError: as `names` does.
        """
        own = self.names({name: np.shape(value) for name, value in tensors.items()})

        def get(name: str, box: Box) -> Any:
            return tensors[own[name]][tuple(slice(*span) for span in box)]

        return {path: self.parameter(path, get) for path in self.shapes}

    def to_theirs(self, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """All tensors from all parameters."""

        def get(path: str, box: Box) -> Any:
            return params[path][tuple(slice(*span) for span in box)]

        return {name: self.tensor(name, get) for name in self._tensors}

    def names(self, found: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Name of each tensor -> the name under which it was found.

        Args:
          found: names and shapes of what there is.

        Raises:
          InputError: what is missing, has another shape, or is not known; a line each.
        """
        own, faults = {}, []
        for name, shape in self.tensors.items():
            short = name.removeprefix(self.prefix)
            known = next((n for n in (name, short) if n in found), None)
            if known is None:
                faults.append(f"weights: {name} is missing; the model needs it, of shape {list(shape)}")
            elif tuple(found[known]) != shape:
                faults.append(
                    f"weights: {known} has shape {list(found[known])}, the model's config makes it {list(shape)}"
                )
            else:
                own[name] = known
        for name in found.keys() - set(own.values()):
            shown = name if name.startswith(self.prefix) else self.prefix + name
            if (
                not any(fnmatchcase(shown, pattern) for pattern in self.ignored)
                and shown not in self._tensors
            ):
                faults.append(f"weights: {name} is no tensor of this model (shape {list(found[name])})")
        if faults:
            raise InputError(sorted(faults))
        return own


def _groups(side: str) -> list[list[str]]:
    return [part.strip("()").split() for part in re.findall(r"\([^)]*\)|\S+", side)]


def _across(
    here: list[list[str]], there: list[list[str]], sizes: Mapping[str, int], box: Box
) -> tuple[Box, Callable[[Any], Any]]:
    """The box of an array laid out as `there` that holds a box of one laid out as `here`, and how to convert it."""
    wanted: dict[str, tuple[int, int]] = {}
    cuts = []
    for group, span in zip(here, box, strict=True):
        start = _split(group, sizes, span, wanted)
        cuts.append(slice(span[0] - start, span[1] - start))
    read = dict(wanted)
    spans = tuple(_joined(group, sizes, read) for group in there)
    before = [letter for group in there for letter in group]
    after = [letter for group in here for letter in group]

    def convert(array: Any) -> Any:
        array = array.reshape([read[letter][1] - read[letter][0] for letter in before])
        array = array.transpose([before.index(letter) for letter in after])
        array = array[tuple(slice(*(at - read[x][0] for at in wanted[x])) for x in after)]
        flat = [math.prod(wanted[x][1] - wanted[x][0] for x in group) for group in here]
        return array.reshape(flat)[tuple(cuts)]

    return spans, convert


def _split(group: list[str], sizes: Mapping[str, int], span: tuple[int, int], spans: dict[str, Any]) -> int:
    """Sets the span of each letter of a dimension such that all of `span` is in them; where they begin in it."""
    if not group:
        return 0
    inner = math.prod(sizes[letter] for letter in group[1:])
    first, last = span[0] // inner, -(-span[1] // inner)
    spans[group[0]] = (first, last)
    if last - first == 1:
        rest = (span[0] - first * inner, span[1] - first * inner)
        return first * inner + _split(group[1:], sizes, rest, spans)
    spans.update({letter: (0, sizes[letter]) for letter in group[1:]})
    return first * inner


def _joined(group: list[str], sizes: Mapping[str, int], spans: dict[str, Any]) -> tuple[int, int]:
    """The span of a dimension that holds those of its letters; they are widened to all that is in it."""
    start, length = 0, 1
    for letter in group:
        if length > 1:
            spans[letter] = (0, sizes[letter])
        a, b = spans[letter]
        start = start * sizes[letter] + a
        length *= b - a
    # `start` counts in units of the innermost letter, and so does what lies between.
    return start, start + length
