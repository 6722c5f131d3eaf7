"""Recipes and single values as TOML text."""

from mpipar.config.recipe import SECTIONS, Recipe

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def to_toml(recipe: Recipe) -> str:
    """Every field of the recipe; `read_recipe` gives back an equal recipe."""
    parts = []
    for section in SECTIONS:
        fields = getattr(recipe, section)
        lines = [f"{name} = {toml_value(value)}" for name, value in fields]
        parts.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(parts) + "\n"


def toml_value(value: object) -> str:
    """A value as it is written in TOML, on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return '"' + "".join(map(_escaped, value)) + '"'
        case list() | tuple():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case dict():
            pairs = (f"{key} = {toml_value(item)}" for key, item in value.items())
            return "{" + ", ".join(pairs) + "}"
    return str(value)


def shown(value: object, width: int = 60) -> str:
    """A value for a message: as TOML, cut to `width` characters."""
    try:
        text = toml_value(value)
    except ValueError:
        # Python refuses to print integers of thousands of digits.
        return f"({type(value).__name__}, too long to show)"
    return text if len(text) <= width else text[: width - 3] + "..."


def _escaped(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    return char if char.isprintable() else f"\\U{ord(char):08x}"
