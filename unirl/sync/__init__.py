"""Weights from the trainer to the rollout engine."""

from unirl.sync.inprocess import InProcessSync

__all__ = ["InProcessSync"]
