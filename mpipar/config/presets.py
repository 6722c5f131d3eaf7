"""Find a recipe by path, or by the name of a preset."""

from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from mpipar.errors import ConfigError


def find_recipe(name: str) -> Path:
    """The file at a path, or the preset called `name` (tiny or tiny.toml).

    Raises ConfigError that lists the presets, the nearest first.
    """
    path = Path(name)
    if path.is_file():
        return path
    presets = _presets()
    if path.name == name and path.name.removesuffix(".toml") in presets:
        return presets[path.name.removesuffix(".toml")]
    near = get_close_matches(path.stem.lower(), presets, n=2, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    kind = "is a folder, not a recipe" if path.is_dir() else "is no file and no preset"
    raise ConfigError(
        [f'recipe "{name}" {kind}; {meant}presets: {", ".join(presets) or "none"}'],
        title="the command",
    )


def preset_names() -> list[str]:
    """Names that `find_recipe` accepts beside paths."""
    return list(_presets())


def _presets() -> dict[str, Path]:
    # Find the package without importing it: its modules load all the layers.
    spec = find_spec("mpipar.models")
    folders = spec.submodule_search_locations if spec else None
    files = (file for folder in folders or () for file in Path(folder).glob("*.toml"))
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}
