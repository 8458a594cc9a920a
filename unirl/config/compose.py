"""Composes a recipe, presets and overrides with Hydra over the schema's defaults, and validates the result."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import yaml
from hydra import compose as hydra_compose
from hydra import initialize
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers.oc import env

from unirl.config.build import build
from unirl.config.catalog import default_tree, nearest
from unirl.config.overrides import one_line, read_overrides
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
    recipe = check_recipe_name(config_name, folders)
    parsed, problems = read_overrides(overrides, find_presets(folders))
    with _named_variables() if purpose == "plan" else nullcontext():
        config, findings = build(_compose_untyped(recipe, parsed, folders))
    problems += findings.problems
    if purpose != "print":
        problems += check_rules(config, findings.broken, include_run_only=purpose == "run")
    if problems:
        raise ConfigError([str(problem) for problem in problems])
    return config


def to_yaml(config: TrainConfig) -> str:
    """The config as YAML, every key with its resolved value; it can be used as a recipe again."""
    return yaml.safe_dump(_escape(default_tree(config)), sort_keys=False, allow_unicode=True, width=120)


def _compose_untyped(recipe: str, overrides: Sequence[str], folders: Sequence[Path]) -> DictConfig:
    OmegaConf.register_new_resolver("sibling", _sibling, replace=True)
    _store_root(recipe, folders)
    try:
        with initialize(version_base="1.3", config_path=None):
            return hydra_compose(_ROOT, overrides=list(overrides))
    except MissingConfigException as error:
        raise UserError(_explain_missing_file(error)) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config-name={recipe}: {one_line(error)}") from error


@contextmanager
def _named_variables() -> Iterator[None]:
    """While entered, an environment variable that is not set reads as `$NAME`: a plan can do without what it names."""
    OmegaConf.register_new_resolver(
        "oc.env", lambda name, *default: env(name, default[0] if default else f"${name}"), replace=True
    )
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", env, replace=True)


def _store_root(recipe: str, folders: Sequence[Path]) -> None:
    """The root of the composition: the schema's defaults, then the recipe laid over them at the top level."""
    group, _, name = recipe.rpartition("/")
    root: dict[str, Any] = default_tree(TrainConfig)
    root["defaults"] = ["_self_", {f"/{group}@_global_": name} if group else name]
    root["hydra"] = {"searchpath": [f"file://{folder}" for folder in folders]}
    ConfigStore.instance().store(name=_ROOT, node=root)


def _sibling(path: str | None, name: str) -> str | None:
    """Resolver `${sibling:path,name}`: the file `name` in the folder of the file `path`; null beside null."""
    return None if path is None else str(Path(path).with_name(name))


def _explain_missing_file(error: MissingConfigException) -> str:
    where = one_line(error).partition(":")[0] if str(error).startswith("In ") else "recipe"
    message = f"{where.removeprefix('In ')}: its defaults name {error.missing_cfg_file!r}, which does not exist"
    if error.options:
        message += f"; the nearest is {nearest(str(error.missing_cfg_file).rpartition('/')[2], list(error.options))}"
    return message


def _escape(value: Any) -> Any:
    """Values as YAML keeps them: `${` in a text is escaped, or it would be read as an interpolation."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {name: _escape(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_escape(member) for member in value]
    return value
