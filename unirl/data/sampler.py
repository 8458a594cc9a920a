"""Which prompts come next: a seeded order per epoch that resumes from two numbers."""

from typing import Any

import numpy as np

from unirl.errors import UserError


class PromptSampler:
    """Draws dataset indices, each epoch every prompt exactly once.

    The order of an epoch depends on (num_prompts, seed, epoch) alone, so the state is only {epoch, position}. A batch
    may span epochs, and may then hold a prompt twice: tell groups apart by their place in the batch, not by the index.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool):
        """`num_prompts` >= 1, `seed` >= 0; without `shuffle` every epoch keeps the dataset's order."""
        if num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, found {num_prompts}")
        self._identity = {"num_prompts": num_prompts, "seed": seed, "shuffle": shuffle}
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._start_epoch(0)

    @property
    def epoch(self) -> int:
        """Epochs finished before the next prompt."""
        return self._epoch

    def next_batch(self, n: int) -> list[int]:
        """The next `n` indices in [0, num_prompts); `n` may exceed num_prompts."""
        batch: list[int] = []
        while len(batch) < n:
            taken = self._order[self._position : self._position + n - len(batch)].tolist()
            batch += taken
            self._position += len(taken)
            if self._position == self._num_prompts:
                self._start_epoch(self._epoch + 1)
        return batch

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        if not self._shuffle:
            self._order = np.arange(self._num_prompts)
            return
        # Sorting raw bits, not Generator.permutation: only for raw bits does numpy promise the same in later versions.
        seed = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
        self._order = np.argsort(np.random.Philox(seed).random_raw(self._num_prompts), kind="stable")

    def state_dict(self) -> dict[str, Any]:
        """{epoch, position} and what they are a state of: {num_prompts, seed, shuffle}. JSON-serialisable."""
        return {"epoch": self._epoch, "position": self._position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken. Raises UserError for a state of another dataset size, seed or shuffle."""
        for name, here in self._identity.items():
            if state[name] != here:
                raise UserError(
                    f"the checkpoint's prompt order has {name}={state[name]}, this run has {name}={here}: "
                    "resume with the data section of the run that saved it, or start a new run_dir"
                )
        if not 0 <= state["position"] < self._num_prompts:
            raise UserError(
                f"the checkpoint's prompt order is damaged: position {state['position']} of {self._num_prompts} prompts"
            )
        self._start_epoch(state["epoch"])
        self._position = state["position"]
