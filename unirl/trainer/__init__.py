"""The training loops."""

from unirl.trainer.ar import ARTrainer

__all__ = ["ARTrainer"]
