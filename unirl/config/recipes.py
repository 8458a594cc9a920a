"""Where recipes and presets are found, and what they are called. Nothing is listed by hand: folders are scanned."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import unirl
from unirl.config.catalog import nearest
from unirl.config.schema import TrainConfig
from unirl.errors import UserError


@dataclass(frozen=True)
class Recipe:
    """`name` is what --config-name takes: the path below a config folder, without its ending."""

    name: str
    path: Path

    @property
    def description(self) -> str:
        """The first comment line of the file, or ""."""
        with open(self.path, encoding="utf-8", errors="replace") as file:
            comments = (line.lstrip("# ").strip() for line in file if line.startswith("#") and "@package" not in line)
            return next(comments, "")


def config_folders(extra: Iterable[str | Path] = ()) -> list[Path]:
    """Existing config folders, the first wins: `extra` (--config-dir), ./examples, those of the installed package, and
    those beside the package in a source checkout. Raises UserError where one of `extra` is missing.
    """
    extra = [Path(folder) for folder in extra]
    for folder in extra:
        if not folder.is_dir():
            raise UserError(f"--config-dir={folder}: no such folder")
    package = Path(unirl.__file__).parent
    places = [*extra, Path("examples"), package / "examples", package.parent / "examples"]
    return list(dict.fromkeys(place.resolve() for place in places if place.is_dir()))


def find_recipes(folders: Sequence[Path]) -> dict[str, Recipe]:
    """All recipes by name. A folder that has the name of a config section holds presets of it, not recipes."""
    groups = preset_groups(folders)
    return {recipe.name: recipe for recipe in _scan(folders) if recipe.name.partition("/")[0] not in groups}


def find_presets(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Names of the presets of each section that has some: {"algorithm": ["drpo", "grpo"]}."""
    groups = preset_groups(folders)
    presets: dict[str, list[str]] = {group: [] for group in sorted(groups)}
    for recipe in _scan(folders):
        group, _, name = recipe.name.partition("/")
        if group in presets:
            presets[group].append(name)
    return presets


def preset_groups(folders: Sequence[Path]) -> set[str]:
    """Names of the sections for which a folder of presets exists."""
    return {item.name for item in fields(TrainConfig) if any((folder / item.name).is_dir() for folder in folders)}


def check_recipe_name(name: str, folders: Sequence[Path]) -> str:
    """The name without a `.yaml` ending. Raises UserError, naming the nearest recipe, where there is none of it."""
    name = name.removesuffix(".yaml")
    recipes = find_recipes(folders)
    if name in recipes:
        return name
    searched = ", ".join(str(folder) for folder in folders) or "no folder (./examples does not exist)"
    if not recipes:
        raise UserError(f"--config-name={name}: no recipes found in {searched}; name their folder with --config-dir")
    raise UserError(
        f"--config-name={name}: no such recipe; the nearest is {nearest(name, list(recipes))} (searched {searched})"
    )


def _scan(folders: Sequence[Path]) -> list[Recipe]:
    """Every YAML file once; where two folders hold one of the same name, that of the earlier folder."""
    found: dict[str, Recipe] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.yaml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            found.setdefault(name, Recipe(name, path))
    return [found[name] for name in sorted(found)]
