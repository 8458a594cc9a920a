"""A rollout engine in plain torch: runs where the caller runs, on CPU or CUDA."""

from unirl.rollout.native.engine import NativeRolloutEngine

__all__ = ["NativeRolloutEngine"]
