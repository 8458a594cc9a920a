"""The command line of training: options, and config keys as key=value."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from unirl.config.catalog import walk
from unirl.config.compose import Purpose, compose
from unirl.config.recipes import config_folders, find_presets, find_recipes
from unirl.config.schema import TrainConfig
from unirl.errors import UserError

_USAGE = "python -m unirl.train_ar --config-name=RECIPE [key=value ...] [--dry-run | --cfg job] [--config-dir=FOLDER]"


@dataclass(frozen=True)
class Command:
    """A parsed command line; `purpose` "help" asks for the help text, the others are those of `compose`."""

    purpose: Purpose | str
    config_name: str
    overrides: tuple[str, ...]
    config_dirs: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (usage: {_USAGE})")


def parse(argv: Sequence[str]) -> Command:
    """Raises UserError on an option that does not exist or lacks its value."""
    parser = _Parser(prog="unirl.train_ar", add_help=False, allow_abbrev=False)
    parser.add_argument("--config-name", default="")
    parser.add_argument("--config-dir", action="append", default=[])
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    options, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-")]
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        raise UserError(f"unknown option {unknown[0]!r}; config keys are given without dashes: {name}=...")
    purpose = "help" if options.help else "print" if options.cfg else "plan" if options.dry_run else "run"
    if not options.config_name and purpose != "help":
        recipes = ", ".join(find_recipes(config_folders(options.config_dir))) or "none"
        raise UserError(f"--config-name is not given; recipes found: {recipes}")
    return Command(purpose, options.config_name, tuple(rest), tuple(options.config_dir))


def load_config(argv: Sequence[str]) -> TrainConfig:
    """The validated config of a command line such as ["--config-name=ar/my_recipe", "seed=1"]."""
    command = parse(argv)
    purpose: Purpose = "run" if command.purpose == "help" else command.purpose
    return compose(command.config_name, command.overrides, command.config_dirs, purpose)


def help_text(config_dirs: Sequence[str]) -> str:
    """Options, the recipes and presets found, and every key with its default, type, rule and doc."""
    folders = config_folders(config_dirs)
    recipes = [f"  {recipe.name}\n      {recipe.description}" for recipe in find_recipes(folders).values()]
    presets = [f"  {section}={name}" for section, names in find_presets(folders).items() for name in names]
    return "\n".join(
        [
            f"usage: {_USAGE}",
            "",
            "  --config-name=RECIPE  the recipe: one of those below, or a file of your own below --config-dir",
            "  --config-dir=FOLDER   look for recipes here first (may be given several times)",
            "  --dry-run             check the config, print topology and batch geometry, load nothing",
            "  --cfg job             print the resolved config as YAML",
            "  key=value             set a key; key=null unsets it; `???` below marks keys that must be given",
            "",
            f"recipes (found in {', '.join(map(str, folders)) or 'no folder'}):",
            *(recipes or ["  none"]),
            "",
            "presets:",
            *(presets or ["  none"]),
            "",
            "keys:",
            *_key_lines(),
        ]
    )


def _key_lines() -> list[str]:
    lines = []
    for entry in walk(TrainConfig):
        if entry.is_section:
            lines.append(f"\n  {entry.path}: {entry.doc}")
        else:
            about = ", ".join(part for part in (entry.type, entry.rule) if part)
            lines.append(f"  {entry.path}={entry.default}  ({about})\n      {entry.doc}")
    return lines
