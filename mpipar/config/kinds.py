"""The kinds of values that fields of a recipe take."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

AXES = ("tp", "cp", "dp", "pp")

# Ways to attend over a sequence that several ranks share
METHODS = ("ring", "zigzag", "striped", "allgather", "ulysses", "usp")

# Counts fit 32 signed bits, so that products of two of them fit 64.
LARGEST = 2**31 - 1

Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
AboveZero = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


def _to_tuple(value: Any) -> Any:
    """TOML has lists, frozen models hold tuples."""
    return tuple(value) if isinstance(value, list) else value


def counts_as_text(value: Any) -> Any:
    """One number or a list of numbers as "3,4,4,3"."""
    numbers = value if isinstance(value, list) else [value]
    if all(type(number) is int for number in numbers):
        return ",".join(map(str, numbers))
    return value


def _each_axis_once(order: Sequence[str]) -> Sequence[str]:
    if sorted(order) != sorted(AXES):
        raise ValueError("not a permutation of the axes")
    return order


Order = Annotated[
    tuple[str, ...], BeforeValidator(_to_tuple), AfterValidator(_each_axis_once)
]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )
