"""The protocol that every rollout engine follows."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from unirl.types import Completion, GenerationRequest

ProgressCallback = Callable[[int], None]
"""Called with the number of samples finished since `generate` began; often (after every token), so it must be cheap."""


class RolloutEngine(Protocol):
    """Samples from the rollout policy. Another engine is another folder beside `native/`."""

    weight_version: int
    """Version of the weights that the next token is drawn with; 0 before the first `update_weights`."""

    def generate(
        self, requests: Sequence[GenerationRequest], on_progress: ProgressCallback | None = None
    ) -> list[list[Completion]]:
        """One list per request, one completion per seed, in order.

        Raises ValueError on a token id outside the vocabulary or a prompt that leaves no room to generate.
        """

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights by `weights` (Hugging Face names, full unsharded tensors) and any cached state of the
        old ones. Raises ValueError when the set of names or a shape does not match the model's.
        """

    def release_memory(self) -> None:
        """Give back the memory of weights and caches where the engine can, until the next `update_weights` takes it
        again; to generate before that is an error (RuntimeError).
        """

    def metrics(self) -> dict[str, float]:
        """What an iteration is to report of the engine, by `rollout/...` and `sync/...` names; counts are since it was
        made.
        """

    def close(self) -> None:
        """Free everything the engine holds; may be called twice."""
