"""YAML with the core schema of YAML 1.2: text to values that remember where they stood, and back.

PyYAML reads and writes the syntax; only its table of plain scalars is replaced (its own is that
of YAML 1.1, where ``off`` is false and ``3e-4`` is text).  No tag outside the core schema is
known, so nothing in a file can name a class or a function.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

# No config comes near these; a few bytes of aliases, brackets or digits can pass any of them.
MAX_VALUES = 100_000
MAX_DEPTH = 64
MAX_DIGITS = 1000


@dataclass(frozen=True)
class Leaf:
    """A value that is not a mapping of keys: a scalar, a list, or an empty mapping."""

    value: Any
    shown: str  # as the user wrote it, on one line
    where: str  # "FILE:LINE", the name of an environment variable, or "" for the command line


Tree = dict[str, Any]  # key -> Tree | Leaf


class YamlFault(Exception):
    """The text is not what a config can be: `line` (from 1; 0: unknown) and what is wrong there."""

    def __init__(self, message: str, line: int = 0):
        super().__init__(message)
        self.line = line


_TAG = "tag:yaml.org,2002:"
_INFINITY_OR_NAN = r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"


def _to_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _to_float(text: str) -> float:
    return float(text.replace(".", "", 1)) if re.fullmatch(_INFINITY_OR_NAN, text) else float(text)


# In the order they are tried; an int is a float too, so int stands first.
_SCALARS: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    _TAG + "null": (re.compile(r"(null|Null|NULL|~|)\Z"), lambda text: None),
    _TAG + "bool": (re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), lambda text: text[0] in "tT"),
    _TAG + "int": (re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), _to_int),
    _TAG + "float": (re.compile(rf"({_FLOAT}|{_INFINITY_OR_NAN})\Z"), _to_float),
}


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def represent_text(self, text: str) -> yaml.Node:
        # In quotes of the other kinds PyYAML loses U+0085 and its like, which it takes for line breaks.
        return self.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {}
    for _tag, (_pattern, _) in _SCALARS.items():
        _kind.add_implicit_resolver(_tag, _pattern, None)


_TOO_DEEP = f"lists or mappings are nested more than {MAX_DEPTH} deep"


class _Reader:
    """One text's nodes turned into a tree of leaves (or, inside lists, into plain values)."""

    def __init__(self, where: Callable[[int], str]):
        self.where = where
        self.count = 0
        self.open: set[int] = set()

    def _enter(self, node: yaml.Node) -> int:
        line = node.start_mark.line + 1
        self.count += 1
        if self.count > MAX_VALUES:
            raise YamlFault(f"holds more than {MAX_VALUES} values (aliases count each time)", line)
        if id(node) in self.open:
            raise YamlFault("an alias stands inside the value that it names", line)
        if len(self.open) > MAX_DEPTH:
            raise YamlFault(_TOO_DEEP, line)
        if not (node.tag in _SCALARS or node.tag in (_TAG + "str", _TAG + "seq", _TAG + "map")):
            raise YamlFault(f"the tag {node.tag.replace(_TAG, '!!')} is not allowed in a config", line)
        return line

    def tree(self, node: yaml.Node) -> Tree | Leaf:
        line = self._enter(node)
        if isinstance(node, yaml.MappingNode) and node.value:
            return dict(self._items(node, self.tree))
        value = self._value(node, line)
        raw = node.value if isinstance(node, yaml.ScalarNode) and not isinstance(value, str) else None
        return Leaf(value, show(value, raw), self.where(line))

    def plain(self, node: yaml.Node) -> Any:
        return self._value(node, self._enter(node))

    def _value(self, node: yaml.Node, line: int) -> Any:
        if isinstance(node, yaml.MappingNode):
            return dict(self._items(node, self.plain))
        if isinstance(node, yaml.SequenceNode):
            self.open.add(id(node))
            values = [self.plain(item) for item in node.value]
            self.open.discard(id(node))
            return values
        return self._scalar(node, line)

    def _items(self, node: yaml.MappingNode, read: Callable[[yaml.Node], Any]) -> list[tuple[str, Any]]:
        self.open.add(id(node))
        lines: dict[str, int] = {}
        items = []
        for key_node, value_node in node.value:
            line = self._enter(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise YamlFault("a key is a name, not a list or a mapping", line)
            key = self._text(key_node, line)
            if key == "<<":
                raise YamlFault(
                    "YAML 1.2 has no merge key <<; give what is shared as a file of its own", line
                )
            if key in lines:
                raise YamlFault(f"{key} is given twice (also in line {lines[key]})", line)
            lines[key] = line
            items.append((key, read(value_node)))
        self.open.discard(id(node))
        return items

    def _text(self, node: yaml.Node, line: int) -> str:
        try:
            text: str = node.value
            text.encode()
        except UnicodeEncodeError:
            raise YamlFault("holds half of a surrogate pair, which is no character", line) from None
        return text

    def _scalar(self, node: yaml.Node, line: int) -> Any:
        text = self._text(node, line)
        if node.tag not in _SCALARS:
            return text
        pattern, convert = _SCALARS[node.tag]
        if not pattern.match(text):
            raise YamlFault(f"{show(text)} is not of type {node.tag.replace(_TAG, '!!')}", line)
        try:
            return convert(text)
        except ValueError:
            raise YamlFault(f"the number {shorten(text)} is too long", line) from None


def parse(text: str, where: Callable[[int], str]) -> Tree | Leaf | None:
    """The tree of one YAML document, None where it holds nothing.

    `where` turns a line number (from 1) into what messages call the place.  Raises YamlFault.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _Reader(where).tree(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = [part for part in (error.context, error.problem) if part]
        raise YamlFault(", ".join(said), mark.line + 1 if mark else 0) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlFault(f"character U+{error.character:04X} is not allowed in YAML", line) from None
    except RecursionError:
        raise YamlFault(_TOO_DEEP) from None


def dump_values(values: dict[str, Any]) -> str:
    """YAML text of nested plain values that `parse` reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=4096)


def shorten(text: str, limit: int = 80) -> str:
    """`text` cut to at most `limit` characters, the cut marked."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def one_line(text: str) -> str:
    """`text` with line breaks and other characters that do not print written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show(value: Any, raw: str | None = None) -> str:
    """A value on one line, as the user would write it: text in quotes, scalars as in `raw`."""
    if raw is not None and not isinstance(value, (str, list, dict)):
        return shorten(raw) or "nothing"
    if value is None:
        return "null"
    return shorten(json.dumps(value, ensure_ascii=False, default=str))
