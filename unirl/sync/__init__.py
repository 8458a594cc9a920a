"""Weights from the trainer to the rollout engine."""

from unirl.sync.disk import DiskTransfer
from unirl.sync.live import DistributedTransfer, TensorTransfer
from unirl.sync.publish import WeightSync

__all__ = ["DiskTransfer", "DistributedTransfer", "TensorTransfer", "WeightSync"]
