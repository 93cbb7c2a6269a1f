"""What is wrong with a config, in the user's words: one line a fault, with the nearest known key."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dsjax.config.fields import LARGEST_INT, Takes
from dsjax.config.schema import Config
from dsjax.config.yaml_core import Leaf, Tree, show

# What other trainers call our keys; spelling alone does not lead from one to the other.
_OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "max_lr": "optimizer.learning_rate",
    "min_lr": "optimizer.schedule.min_lr_ratio",
    "warmup": "optimizer.schedule.warmup_steps",
    "lr_scheduler_type": "optimizer.schedule.kind",
    "grad_clip": "optimizer.max_grad_norm",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "batch_size": "train.global_batch_size",
    "seq_len": "train.sequence_length",
    "max_seq_len": "train.sequence_length",
    "context_length": "train.sequence_length",
    "accumulation_steps": "train.gradient_accumulation_steps",
    "microbatches": "train.gradient_accumulation_steps",
    "gradient_checkpointing": "train.remat",
    "dtype": "precision.policy",
    "output_dir": "run.dir",
    "save_steps": "checkpoint.disk.every",
    "save_every": "checkpoint.disk.every",
    "eval_every": "eval.every",
    "devices": "runtime.cpu_devices",
    "num_workers": "data.workers",
}


def walk(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key below `model` in the order of the schema, sections before what they hold."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        section = section_of(field.annotation)
        if section is not None:
            yield from walk(section, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field of this type is, None for a plain value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def takes(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a field of this type takes, in words: ``an integer >= 1``, ``text or null``."""
    for mark in metadata:
        if isinstance(mark, Takes):
            return mark.text
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner: list[Any] = []
        for mark in parts[1:]:
            inner.extend(mark.metadata if isinstance(mark, FieldInfo) else [mark])
        return takes(parts[0], [*inner, *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else takes(part, metadata) for part in parts)
    if origin is Literal:
        return _alternatives([str(part) for part in parts])
    if annotation is bool:
        return "true or false"
    if annotation in (int, float):
        return ("an integer" if annotation is int else "a number") + _bounds(metadata)
    if origin is list:
        return "a list of sections" if section_of(parts[0]) else f"a list, each {takes(parts[0])}"
    if section_of(annotation) is not None:
        return "a section (a mapping of keys)"
    return "text"


def _bounds(metadata: Sequence[Any]) -> str:
    low = next(
        (
            f"{'>=' if isinstance(m, Ge) else '>'} {m.ge if isinstance(m, Ge) else m.gt}"
            for m in metadata
            if isinstance(m, (Ge, Gt))
        ),
        "",
    )
    high = next(
        (
            f"{'<=' if isinstance(m, Le) else '<'} {m.le if isinstance(m, Le) else m.lt}"
            for m in metadata
            if isinstance(m, (Le, Lt))
        ),
        "",
    )
    return " " + " and ".join(part for part in (low, high) if part) if low or high else ""


def _alternatives(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The known name that `name` most looks like, None where none is close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def unknown_key(key: str, shown: str, siblings: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The line for a key that nobody knows.

    `key` is the full key, `shown` its value in the user's words, `siblings` the known names
    beside it, `elsewhere` the full keys of other sections where it may belong.
    """
    prefix, _, leaf = key.rpartition(".")
    dot = f"{prefix}." if prefix else ""
    siblings, elsewhere = list(siblings), list(elsewhere)
    said = f"{key}: unknown key (got {shown})"
    namesakes = [other for other in elsewhere if other.rpartition(".")[2] == leaf and other != key]
    if dot and any(other.startswith(dot) for other in namesakes):
        namesakes = [other for other in namesakes if other.startswith(dot)]
    close = nearest(leaf, siblings)
    if close is not None:
        guess = dot + close
    elif namesakes:
        guess = _alternatives(namesakes)
    elif _OTHER_NAMES.get(leaf) in elsewhere:
        guess = _OTHER_NAMES[leaf]
    else:
        leaves = {other.rpartition(".")[2]: other for other in elsewhere}
        far = nearest(leaf, leaves, 0.8)
        guess = nearest(key, elsewhere, 0.8) or (leaves[far] if far else "")
    if guess:
        return f"{said}; did you mean {guess}?"
    holder = f"{prefix} takes" if prefix else "the sections are"
    return f"{said}; {holder} {', '.join(siblings)}"


def faults_of(error: ValidationError, tree: Tree, *, whole: bool = True) -> list[str]:
    """One line for each thing that validation found wrong with `tree`.

    `whole`: the tree is all that the user gave, so that faults of several keys together count.
    """
    faults = []
    for item in error.errors(include_url=False):
        loc, value = item["loc"], item["input"]
        if loc and loc[-1] == "[key]":  # pydantic's mark of the name, not the value, being at fault
            faults.append(f"{_key(loc[:-2])}: a name takes text that is not empty, got {show(value)}")
            continue
        leaf = _find(tree, loc)
        if item["type"] == "extra_forbidden":
            faults.append(_unknown(loc, value, leaf) + _place(leaf))
        elif item["type"] == "value_error" and _section_at(loc):
            prefix = f"{_key(loc)}: " if loc else ""
            together = [prefix + line for line in str(item["ctx"]["error"]).split("\n")]
            faults.extend(together if whole else [])
        elif item["type"] == "missing":
            faults.append(f"{_key(loc)}: is missing; it takes {takes(*_type_at(loc))}{_place(leaf)}")
        else:
            wanted = takes(*_type_at(loc))
            got = _shown(value, leaf) + _hint(wanted, value)
            faults.append(f"{_key(loc)}: takes {wanted}, got {got}{_place(leaf)}")
    return faults


def _unknown(loc: Sequence[str | int], value: Any, leaf: Leaf | None) -> str:
    holder = _section_at(loc[:-1])
    assert holder is not None  # pydantic refuses keys only in sections
    names = list(holder.model_fields)
    outer, dot, inner = str(loc[-1]).rpartition(".")
    if dot and holder is Config:
        said = f"{loc[-1]}: unknown key (got {_shown(value, leaf)})"
        return f"{said}; in a file {inner} is written inside the section {outer}"
    if any(isinstance(part, int) for part in loc):
        elsewhere = []  # inside a list's section no other section's key can be meant
    else:
        sections = isinstance(value, dict)
        elsewhere = [key for key, field in walk() if sections == (section_of(field.annotation) is not None)]
    return unknown_key(_key(loc), _shown(value, leaf), names, elsewhere)


def _shown(value: Any, leaf: Leaf | None) -> str:
    """`value` as the user wrote it, where it is all of a leaf."""
    return leaf.shown if leaf is not None and leaf.value is value else show(value)


def _find(tree: Tree, loc: Sequence[str | int]) -> Leaf | None:
    """The leaf that holds the value at `loc`, or the first leaf below it; None: given nowhere."""
    node: Any = tree
    for part in loc:
        if isinstance(node, Leaf):
            return node
        node = node.get(part) if isinstance(node, dict) else None
    while isinstance(node, dict):
        node = next(iter(node.values()), None)
    return node if isinstance(node, Leaf) else None


def _place(leaf: Leaf | None) -> str:
    return f" [{leaf.where}]" if leaf is not None and leaf.where else ""


def _key(loc: Sequence[str | int]) -> str:
    key = ""
    for part in loc:
        name = f"[{part}]" if isinstance(part, int) else part or '""'
        key += f".{name}" if key and isinstance(part, str) else name
    return key


def _type_at(loc: Sequence[str | int]) -> tuple[Any, Sequence[Any]]:
    """The type at `loc` and what else its annotation says."""
    annotation: Any = Config
    metadata: Sequence[Any] = ()
    for part in loc:
        while get_origin(annotation) in (Annotated, Union, types.UnionType):
            annotation = get_args(annotation)[0]
        section = section_of(annotation)
        if section is not None:
            field = section.model_fields.get(str(part))
            if field is None:
                return Any, ()
            annotation, metadata = field.annotation, field.metadata
        else:  # an item of a list, a value of a mapping
            annotation, metadata = get_args(annotation)[-1], ()
    return annotation, metadata


def _section_at(loc: Sequence[str | int]) -> type[BaseModel] | None:
    annotation = _type_at(loc)[0]
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return section_of(annotation)


def _hint(wanted: str, value: Any) -> str:
    if wanted.startswith("an integer"):
        if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_INT:
            return f"; write {int(value)}"
        if isinstance(value, int) and value > LARGEST_INT and "<=" not in wanted:
            return f"; no integer above {LARGEST_INT} fits"
    if re.search(r"text|name|path|pattern", wanted) and isinstance(value, (bool, int, float)):
        return "; text that looks like a number or a switch stands in quotes"
    return ""
