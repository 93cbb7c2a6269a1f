"""Types of the config's fields: bounds, and what a field takes in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator


@dataclass(frozen=True)
class Takes:
    """What a field takes, in words, where its type and bounds do not say it well enough."""

    text: str


def one_or_many(value: Any) -> Any:
    """A list of one where a single text was given."""
    return [value] if isinstance(value, str) else value


def not_zero(value: int) -> int:
    """Refuses 0."""
    if value == 0:
        raise ValueError("is 0")
    return value


LARGEST_INT = 2**31 - 1  # steps and sizes are 32-bit integers on the device


def fits_an_int(value: int) -> int:
    """Refuses what a device's integers cannot hold."""
    if value > LARGEST_INT:
        raise ValueError(f"is above {LARGEST_INT}")
    return value


PositiveInt = Annotated[int, Field(ge=1), AfterValidator(fits_an_int)]
NonNegativeInt = Annotated[int, Field(ge=0), AfterValidator(fits_an_int)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
NonEmpty = Annotated[str, Field(min_length=1), Takes("text that is not empty")]
PathList = Annotated[list[NonEmpty], BeforeValidator(one_or_many), Takes("a path or a list of paths")]
PatternList = Annotated[
    list[NonEmpty], BeforeValidator(one_or_many), Takes("a pattern or a list of patterns")
]

AxisSize = Annotated[
    int,
    Field(ge=-1),
    AfterValidator(not_zero),
    AfterValidator(fits_an_int),
    Takes("an integer >= 1, or -1 for the rest of the devices"),
]


def _tensor_size(value: Any) -> Any:
    pair = isinstance(value, list | tuple)
    sizes, least = (list(value), 1) if pair else ([value], -1)
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    if not whole or (pair and len(sizes) != 2) or not all(least <= s <= LARGEST_INT and s for s in sizes):
        raise ValueError("is no size and no pair of sizes")
    return sizes if pair else value


TensorSize = Annotated[
    int | list[int],
    PlainValidator(_tensor_size),
    Takes("an integer >= 1, -1 for the rest of the devices, or two of them: [columns, rows]"),
]


class Section(BaseModel):
    """A section of the config: unknown keys are refused, values are not coerced across types."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True)


def described(default: Any, text: str) -> Any:
    """A field of a section: its default and the reference's line about it."""
    return Field(default=default, description=text)
