"""The config: schema, recipes, overrides and validation. Nothing in here imports torch."""

from unirl.config.command import load_config
from unirl.config.compose import compose, to_yaml
from unirl.config.schema import TrainConfig

__all__ = ["TrainConfig", "compose", "load_config", "to_yaml"]
