"""The run in a run directory, as the commands of the elastic pool find it."""

from pathlib import Path

import yaml
from omegaconf import OmegaConf

from unirl.config.build import build
from unirl.config.schema import TrainConfig
from unirl.errors import UserError
from unirl.observe.pool_folder import PoolFolder, Presence


def find_run(run_dir: Path) -> tuple[PoolFolder, Presence]:
    """The pool of the run that lives in `run_dir`. Raises UserError where none does, or it has no servers."""
    config = run_dir / "config.yaml"
    if not config.is_file():
        raise UserError(f"{run_dir} holds no run (no config.yaml): give the run_dir of one that has started to train")
    engine = (yaml.safe_load(config.read_text()).get("rollout") or {}).get("engine")
    if engine != "sglang":
        raise UserError(f"{run_dir}: the {engine} engine has no servers; runs of rollout.engine=sglang have")
    folder = PoolFolder(run_dir / "pool")
    presence = folder.presence()
    if presence is None:
        raise UserError(f"no run lives in {run_dir}: it has ended, or does not have its first servers yet")
    return folder, presence


def saved_config(run_dir: Path) -> TrainConfig:
    """The config that the run has written. Raises UserError where this version reads it otherwise."""
    config, findings = build(OmegaConf.load(run_dir / "config.yaml"))
    if findings.problems:
        problems = "; ".join(map(str, findings.problems))
        raise UserError(f"{run_dir}/config.yaml was written by another version of unirl: {problems}")
    return config
