"""Rules between keys, checked before anything loads. Rules about one key stand in its declaration in the schema."""

from collections.abc import Sequence

from unirl.algorithms.config import gae_config_problems, loss_config_problems, value_loss_config_problems
from unirl.config.problem import Problem
from unirl.config.rules import batch, critic, engine, episodes, layout, method, run, sources
from unirl.config.rules.rule import rules_of
from unirl.config.schema import TrainConfig

RULES = [
    rule for module in (layout, batch, method, critic, episodes, engine, sources, run) for rule in rules_of(module)
]


def check_rules(config: TrainConfig, broken: Sequence[str] = (), *, include_run_only: bool = True) -> list[Problem]:
    """What the config breaks; `include_run_only`: also why it cannot be run here. A rule that reads a key of `broken`,
    dotted paths of keys that have a problem of their own already, is left out.
    """
    wanted = (rule for rule in RULES if include_run_only or not rule.run_only)
    found = (rule.problem(config) for rule in wanted if not any(rule.reads(path) for path in broken))
    problems = [problem for problem in found if problem]
    if not any(path.startswith("algorithm") for path in broken):
        problems += _loss_problems(config)
    return problems


def run_problems(config: TrainConfig) -> list[Problem]:
    """Why a config that breaks no other rule cannot be run by this version, on this machine."""
    return [problem for rule in RULES if rule.run_only and (problem := rule.problem(config))]


def _loss_problems(config: TrainConfig) -> list[Problem]:
    """Rules between the keys of the loss: they stand beside these, in `unirl.algorithms.config`."""
    algorithm = config.algorithm
    problems = _problems("algorithm", loss_config_problems(algorithm))
    if algorithm.gae is not None:
        problems += _problems("algorithm.gae", gae_config_problems(algorithm.gae))
    if algorithm.critic is not None:
        problems += _problems("algorithm.critic", value_loss_config_problems(algorithm.critic))
    return problems


def _problems(section: str, texts: Sequence[str]) -> list[Problem]:
    found = (text.partition(": ") for text in texts)
    return [Problem(f"{section}.{key}", message) for key, _, message in found]
