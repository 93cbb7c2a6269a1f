"""The config reference (docs/config.md), written from the schema.

``python -m dsjax.config.reference > docs/config.md``
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dsjax.config.changes import FREE_ON_RESUME
from dsjax.config.messages import section_of, takes
from dsjax.config.parallel import MESH_ALIASES
from dsjax.config.schema import Config, MixtureSource, ModelConfig

_INTRODUCTION = """\
# Config reference

<!-- Written by `python -m dsjax.config.reference > docs/config.md`; edit the fields of dsjax/config instead. -->

A run is described by one YAML file, or several, and settings:
`dsjax train base.yaml more.yaml train.steps=500`.
What is given twice is taken from, in this order: `key=value` on the command line, `DSJAX_SECTION__KEY` in the
environment (`DSJAX_OPTIMIZER__LEARNING_RATE=1e-3`; a key's parts are joined by two underscores), later files,
earlier files, the defaults below. Mappings merge key by key; a list replaces the list before it.

Values are those of YAML 1.2: `3e-4` is a number, `true` and `false` are switches, `off`, `no` and `1_000`
are text, `null` (or nothing) is no value. Text that looks like another type stands in quotes: `"5"`. Tags and
merge keys (`<<`) are refused. Relative paths start at the current directory. A key that is not listed here is
an error, and so is a value of another type; `dsjax train CONFIG --dry-run` prints every setting as it was
understood, and stops.
"""


def reference() -> str:
    """Markdown that lists every key: what it takes, its default, what it means."""
    parts = [_INTRODUCTION]
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        assert section is not None  # a config holds sections only
        parts.append(f"## {name}\n\n{_prose(section)}\n\n{_table(section, name)}")
        if section is ModelConfig:
            parts.append("Every other key of this section is a field of the model that `kind` names.\n")
        if name == "mesh":
            aliases = ", ".join(f"`{short}` for `{axis}`" for short, axis in MESH_ALIASES.items())
            parts.append(f"Short names are accepted: {aliases}.\n")
        if name == "data":
            parts.append(
                f"### data.mixture\n\n{_prose(MixtureSource)}\n\n{_table(MixtureSource, 'data.mixture[]')}"
            )
    free = ", ".join(f"`{key.replace('.*.', '[].')}`" for key in FREE_ON_RESUME)
    parts.append(
        "## What may change on resume\n\n"
        f"{free}: these may differ from the config that the run was started with. Anything else that "
        "differs is refused, unless `--allow-config-change` is given, which is recorded in the run's "
        "events.\n"
    )
    return "\n".join(parts)


def _table(section: type[BaseModel], prefix: str) -> str:
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    lines += [_row(f"{prefix}.{key}", field) for key, field in _leaves(section)]
    return "\n".join(lines) + "\n"


def _leaves(section: type[BaseModel], prefix: str = "") -> list[tuple[str, FieldInfo]]:
    rows = []
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        rows += [(prefix + name, field)] if inner is None else _leaves(inner, f"{prefix}{name}.")
    return rows


def _row(key: str, field: FieldInfo) -> str:
    cells = [
        f"`{key}`",
        takes(field.annotation, field.metadata),
        "required" if field.is_required() else f"`{_yaml(field.default)}`",
        field.description or "",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _prose(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


if __name__ == "__main__":
    print(reference(), end="")
