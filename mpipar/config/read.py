"""TOML text and `section.field=value` overrides become a checked recipe."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpipar.config.fields import check_fields
from mpipar.config.recipe import Recipe
from mpipar.config.rules import violated
from mpipar.config.values import fill
from mpipar.config.write import shown
from mpipar.errors import ConfigError

# Fields that may hold a path, and the words that are no path.
_PATHS = {("data", "source"): "stdlib", ("data", "tokenizer"): "bytes"}


def read_recipe(
    text: str,
    overrides: Sequence[str] = (),
    base_dir: str | Path | None = None,
    ranks: int | None = None,
) -> Recipe:
    """Read a recipe, and check all that can be checked.

    text       TOML
    overrides  "section.field=value"; the value is TOML, or else plain text; the last
               one of a field wins
    base_dir   folder of the recipe's file: relative paths in the text start there, and
               those in overrides in the working directory; None leaves both as they are
    ranks      when given, the recipe is also resolved for this number of ranks, so that
               one message tells everything

    Raises ConfigError that lists every violation, or the place of a syntax error.
    """
    changes, violations = _parse_overrides(overrides)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([_syntax(text, error), *violations]) from None
    if base_dir is not None:
        _anchor(table, Path(base_dir).expanduser().absolute())
        _anchor(changes, Path.cwd())
    _merge(table, changes)

    checked = check_fields(table)
    values = fill(checked.values, ranks)
    violations += checked.violations + violated(values)
    if violations or checked.recipe is None:
        raise ConfigError(violations)
    return checked.recipe if ranks is None else values.resolved(checked.recipe)


def _parse_overrides(
    overrides: Sequence[str],
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The overrides as a table of sections, and a sentence for each malformed one."""
    changes: dict[str, dict[str, Any]] = {}
    violations = []
    for override in overrides:
        key, equals, text = override.partition("=")
        section, _, field = key.strip().partition(".")
        if equals and section and field and "." not in field:
            changes.setdefault(section, {})[field] = _toml_or_text(text)
        else:
            violations.append(
                f"override {shown(override)} must have the form section.field=value; "
                "try parallel.tensor=2"
            )
    return changes, violations


def _toml_or_text(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A line break in the text may have started a second key.
    return table["value"] if len(table) == 1 else text


def _merge(table: dict[str, Any], changes: dict[str, dict[str, Any]]) -> None:
    for section, fields in changes.items():
        target = table.setdefault(section, {})
        # A section that is no table is reported with the fields.
        if isinstance(target, dict):
            target.update(fields)


def _anchor(table: dict[str, Any], folder: Path) -> None:
    """Make relative paths absolute, so that the recipe means the same anywhere."""
    for (section, field), word in _PATHS.items():
        fields = table.get(section)
        path = fields.get(field) if isinstance(fields, dict) else None
        if isinstance(path, str) and path not in ("", word):
            fields[field] = str(folder / Path(path).expanduser())


def _syntax(text: str, error: Exception) -> str:
    """A syntax error of the TOML text, with its line and column."""
    if isinstance(error, RecursionError):
        return "not TOML: values are nested too deeply"
    message = str(error)
    end = "(at end of document)"
    if message.endswith(end):
        lines = text.split("\n")
        place = f"(at line {len(lines)}, column {len(lines[-1]) + 1})"
        message = message.removesuffix(end) + place
    return f"not TOML: {message[:1].lower()}{message[1:]}"
