"""Composes a recipe, presets and overrides with Hydra over the schema's defaults, and validates the result."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from hydra import compose as hydra_compose
from hydra import initialize
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unirl.config.build import build
from unirl.config.catalog import default_tree, nearest
from unirl.config.recipes import check_recipe_name, config_folders, find_presets
from unirl.config.rules import check_rules
from unirl.config.schema import TrainConfig
from unirl.errors import ConfigError, UserError

Purpose = Literal["print", "plan", "run"]
"""What a config is composed for: to be printed (keys are checked one by one), planned (--dry-run: rules between keys
too), or run (what this version and this machine can run, too)."""

_ROOT = "unirl_root"


def compose(
    config_name: str,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    purpose: Purpose = "run",
) -> TrainConfig:
    """The validated config of a recipe.

    `config_name` is a recipe as in --config-name, `overrides` are `key=value` texts, `config_dirs` are searched first.
    Raises ConfigError with all problems of the config, UserError where the recipe cannot be found or read.
    """
    folders = config_folders(config_dirs)
    composed = _compose_untyped(check_recipe_name(config_name, folders), overrides, folders)
    config, problems = build(composed)
    if purpose != "print":
        broken = [problem.path for problem in problems]
        problems += check_rules(config, broken, include_run_rules=purpose == "run")
    if problems:
        raise ConfigError([str(problem) for problem in problems])
    return config


def to_yaml(config: TrainConfig) -> str:
    """The config as YAML, every key with its resolved value; it can be used as a recipe again."""
    return yaml.safe_dump(_escape(default_tree(config)), sort_keys=False, allow_unicode=True, width=120)


def _compose_untyped(recipe: str, overrides: Sequence[str], folders: Sequence[Path]) -> DictConfig:
    OmegaConf.register_new_resolver("sibling", _sibling, replace=True)
    _store_root(recipe, folders)
    presets = find_presets(folders)
    lines = [_normalise_override(override, presets) for override in _parse_overrides(overrides)]
    try:
        with initialize(version_base="1.3", config_path=None):
            return hydra_compose(_ROOT, overrides=lines)
    except MissingConfigException as error:
        raise UserError(_explain_missing_file(error)) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"--config-name={recipe}: {_one_line(error)}") from error


def _store_root(recipe: str, folders: Sequence[Path]) -> None:
    """The root of the composition: the schema's defaults, then the recipe laid over them at the top level."""
    group, _, name = recipe.rpartition("/")
    root: dict[str, Any] = default_tree(TrainConfig)
    root["defaults"] = ["_self_", {f"/{group}@_global_": name} if group else name]
    root["hydra"] = {"searchpath": [f"file://{folder}" for folder in folders]}
    ConfigStore.instance().store(name=_ROOT, node=root)


def _parse_overrides(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise UserError(f"{text!r} is not an override: config keys are given as key=value")
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise UserError(
                f"cannot read the override {text!r}: {_one_line(error)}; quote values with special characters: "
                "'key=\"value\"'"
            ) from error
        if override.is_sweep_override():
            raise UserError(f"{text!r} gives several values: write a list as key=[a,b], a text as 'key=\"a,b\"'")
        parsed.append(override)
    return parsed


def _normalise_override(override: Override, presets: dict[str, list[str]]) -> str:
    """An override that selects a preset stays as it is; any other is forced in, so that a key that the schema does not
    have is reported with all other problems and by its nearest name.
    """
    value = None if override.type == OverrideType.DEL else override.value()
    if override.key_or_group in presets and isinstance(value, str):
        known = presets[override.key_or_group]
        if value not in known:
            raise UserError(
                f"{override.input_line}: no such preset; the nearest is {nearest(value, known)} (there are: "
                f"{', '.join(known)})"
            )
        return override.input_line
    if override.key_or_group == "hydra" or override.key_or_group.startswith("hydra."):
        raise UserError(f"{override.input_line}: unknown key; settings of Hydra itself have no effect here")
    if override.type in (OverrideType.CHANGE, OverrideType.ADD):
        return f"++{override.input_line.lstrip('+')}"
    return override.input_line


def _sibling(path: str, name: str) -> str:
    """Resolver `${sibling:path,name}`: the file `name` in the folder of the file `path`."""
    return str(Path(path).with_name(name))


def _explain_missing_file(error: MissingConfigException) -> str:
    where = _one_line(error).partition(":")[0] if str(error).startswith("In ") else "recipe"
    message = f"{where.removeprefix('In ')}: its defaults name {error.missing_cfg_file!r}, which does not exist"
    if error.options:
        message += f"; the nearest is {nearest(str(error.missing_cfg_file).rpartition('/')[2], list(error.options))}"
    return message


def _one_line(error: BaseException) -> str:
    """The message of an error, or of what caused it where it has none, without its line breaks."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    return " ".join(line.strip() for line in text.splitlines() if line.strip() and "https://hydra.cc" not in line)


def _escape(value: Any) -> Any:
    """Values as YAML keeps them: `${` in a text is escaped, or it would be read as an interpolation."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {name: _escape(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_escape(member) for member in value]
    return value
