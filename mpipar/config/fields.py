"""Check a table of sections field by field; say what is wrong in our own words."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mpipar.config.kinds import AXES, Section
from mpipar.config.nearest import either
from mpipar.config.recipe import SECTIONS, Parallel, Recipe
from mpipar.config.write import shown
from mpipar.errors import ConfigError

_ALL_KEYS = [
    f"{name}.{key}" for name, cls in SECTIONS.items() for key in cls.model_fields
]
# What says how a model in training is laid out, as it is on one rank
UNCUT: Mapping[str, Any] = {
    **{f"parallel.{name}": f.default for name, f in Parallel.model_fields.items()},
    "parallel.data": 1,
    "train.recompute": "none",
    "train.graph": False,
}
_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


@dataclass(frozen=True)
class Checked:
    """What `check_fields` found.

    recipe      None when there are violations
    values      every valid value, by dotted key; keys with a wrong value are absent
    violations  one sentence per wrong, unknown or missing field
    """

    recipe: Recipe | None
    values: dict[str, Any]
    violations: list[str]


def check_fields(table: Mapping[str, Any]) -> Checked:
    """Check every field of a parsed recipe on its own."""
    violations = [_unknown_section(k, table[k]) for k in table if k not in SECTIONS]
    sections: dict[str, Section] = {}
    values: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        given = table.get(name, {})
        if not isinstance(given, dict):
            violations.append(
                f"{name} = {shown(given)} must be a section: "
                f"write [{name}] and its keys below it"
            )
            continue
        wrong: set[str] = set()
        try:
            sections[name] = cls.model_validate(given)
        except ValidationError as error:
            wrong = {str(e["loc"][0]) for e in error.errors(include_url=False)}
            violations += _violations(name, given, wrong)
        values |= _valid_values(name, given, wrong)
    recipe = None if violations else Recipe(**sections)
    return Checked(recipe, values, violations)


def replace(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with other values, given by dotted key.

    Raises ConfigError that lists every wrong field. Rules between fields are checked
    by `resolve`.
    """
    table = recipe.model_dump()
    for key, value in changes.items():
        section, _, field = key.partition(".")
        table.setdefault(section, {})[field] = value
    checked = check_fields(table)
    if checked.recipe is None:
        raise ConfigError(checked.violations)
    return checked.recipe


def _valid_values(
    name: str, given: Mapping[str, Any], wrong: set[str]
) -> dict[str, Any]:
    fields = SECTIONS[name].model_fields
    return {
        f"{name}.{key}": given.get(key, field.default)
        for key, field in fields.items()
        if key not in wrong
    }


def _violations(
    name: str, given: Mapping[str, Any], wrong: Iterable[str]
) -> Iterator[str]:
    """One sentence per wrong key, unknown keys first, then in the section's order."""
    fields = SECTIONS[name].model_fields
    yield from (_unknown_key(name, k, v) for k, v in given.items() if k not in fields)
    for key, field in fields.items():
        if key not in wrong:
            continue
        if key in given:
            offers = _passing(name, key, given[key])
            tail = f"; try {either(offers)}" if offers else ""
            yield f"{name}.{key} = {shown(given[key])} must be {_legal(field)}{tail}"
        else:
            yield f"{name}.{key} is missing ({field.description}): {_legal(field)}"


def _unknown_section(name: str, value: Any) -> str:
    homes = [key for key in _ALL_KEYS if key.endswith(f".{name}")]
    if not isinstance(value, dict) and homes:
        return (
            f"{name} = {shown(value)} is outside its section; did you mean {homes[0]}?"
        )
    near = get_close_matches(name.lower(), SECTIONS, n=1)
    known = ", ".join(f"[{section}]" for section in SECTIONS)
    tail = f"did you mean [{near[0]}]?" if near else f"a recipe has {known}"
    return f"[{name}] is not a section of the recipe; {tail}"


def _unknown_key(name: str, key: str, value: Any) -> str:
    fields = SECTIONS[name].model_fields
    near = get_close_matches(key.lower(), fields, n=1)
    # A right key in the wrong section comes before a similar key anywhere.
    homes = (
        [f"{name}.{near[0]}" for _ in near]
        or [k for k in _ALL_KEYS if k.endswith(f".{key}")]
        or get_close_matches(f"{name}.{key}".lower(), _ALL_KEYS, n=1, cutoff=0.75)
    )
    tail = f"did you mean {homes[0]}?" if homes else f"[{name}] has {', '.join(fields)}"
    return f"{name}.{key} = {shown(value)} is not a known key; {tail}"


def _legal(field: FieldInfo) -> str:
    """What a field accepts, to follow 'must be'."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return either(get_args(kind))
    if kind is bool:
        return "true or false"
    if kind is str:
        return "text in quotes, not empty"
    if get_origin(kind) is tuple:
        return f"a list of the axes {', '.join(map(shown, AXES))}, each once"
    return f"a {'whole ' if kind is int else ''}number{_range(field)}"


def _range(field: FieldInfo) -> str:
    bounds = _bounds(field)
    if set(bounds) == {"ge", "le"}:
        return f" from {bounds['ge']} to {bounds['le']}"
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    return " " + " and ".join(f"{words[b]} {limit}" for b, limit in bounds.items())


def _bounds(field: FieldInfo) -> dict[str, float]:
    """The limits of a number, by kind of bound: ge, gt, le, lt."""
    return {
        kind: getattr(bound, kind)
        for bound in field.metadata
        for kind in ("ge", "gt", "le", "lt")
        if hasattr(bound, kind)
    }


def _passing(name: str, key: str, value: Any) -> list[Any]:
    """Legal values nearest to a wrong one; none when the rule says it all."""
    field = SECTIONS[name].model_fields[key]
    try:
        offers = dict.fromkeys(_similar(value, field))
    except ValueError:
        # Python refuses to print integers of thousands of digits.
        return []
    return [offer for offer in offers if _passes(name, key, offer)]


def _passes(name: str, key: str, value: Any) -> bool:
    try:
        SECTIONS[name].model_validate({key: value})
    except ValidationError as error:
        return all(e["loc"][0] != key for e in error.errors(include_url=False))
    return True


def _similar(value: Any, field: FieldInfo) -> list[Any]:
    """Guesses at what was meant, legal or not."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return get_close_matches(str(value).lower(), get_args(kind), n=1)
    if kind is bool:
        word = str(value).lower()
        return [True] if word in _TRUE else [False] if word in _FALSE else []
    if get_origin(kind) is tuple:
        named = [axis for axis in AXES if axis in value] if _is_list(value) else []
        given = sorted(named, key=lambda axis: value.index(axis))
        return [(*given, *(axis for axis in AXES if axis not in given))]
    if kind is str:
        return [] if isinstance(value, str | list | dict) else [str(value)]
    return _similar_numbers(value, field)


def _similar_numbers(value: Any, field: FieldInfo) -> list[float]:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return []
    if isinstance(value, bool) or not math.isfinite(number):
        return []
    bounds = _bounds(field)
    low, high = bounds.get("ge", -math.inf), bounds.get("le", math.inf)
    if not low <= number <= high:
        return [low if number < low else high]
    if field.annotation is int:
        return [math.floor(number), math.ceil(number)]
    return [number]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
