"""From prompts to a `Part`: seeds, requests, and the packing of what an engine answers in one turn."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from unirl.rollout.engine import ProgressCallback, RolloutEngine
from unirl.rollout.pack import Row, pack_rows
from unirl.types import Completion, GenerationRequest, Part, SamplingParams


class Prompt(Protocol):
    """What is needed of a prompt: the token ids that are sent, and its record (`prompt`, `answer`, ...)."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def record(self) -> dict[str, Any]: ...


class Workflow(Protocol):
    """From prompts to a `Part`, one sample each, see `single_turn`. A `Part` with `rewards` needs no grading."""

    def __call__(
        self,
        prompts: Sequence[Prompt],
        *,
        params: SamplingParams,
        seed: int,
        iteration: int,
        num_samples: int,
        first_sample_id: int,
        first_position: int = 0,
        on_progress: ProgressCallback | None = None,
    ) -> Part: ...


def single_turn(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    params: SamplingParams,
    seed: int,
    iteration: int,
    num_samples: int,
    first_sample_id: int,
    first_position: int = 0,
    on_progress: ProgressCallback | None = None,
) -> Part:
    """Draw `num_samples` samples of each prompt, packed as by `pack_completions`.

    The same seed, iteration, positions and prompts give the same samples, whatever was generated before.
    `first_position` is that of the first prompt among all prompts of the iteration: where they come in several calls,
    no two share a position, and so a random stream.
    """
    requests = [
        GenerationRequest(
            prompt_ids=tuple(prompt.token_ids),
            params=params,
            seeds=tuple(sample_seed(seed, iteration, position, sample) for sample in range(num_samples)),
        )
        for position, prompt in enumerate(prompts, start=first_position)
    ]
    return pack_completions(prompts, engine.generate(requests, on_progress), first_sample_id=first_sample_id)


def sample_seed(seed: int, iteration: int, position: int, sample: int) -> int:
    """The seed, in [0, 2**63), of sample number `sample` of the prompt at `position` in `iteration`.

    A hash of all four (numpy's `SeedSequence`): none of them can be traded for another, as a sum of them could.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(iteration, position, sample))
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def pack_completions(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], *, first_sample_id: int
) -> Part:
    """One `Part` of all completions, those of one prompt side by side; each sample is one turn.

    completions: one list per prompt, in order. Samples are numbered from `first_sample_id`. A group is one entry of
    `prompts` (the same prompt twice is two groups) and bears the id of its first sample, so that ids stay unique over a
    run when sample ids do. The records are those of the prompts, not copies.

    Raises ValueError where a completion's fields differ in length.
    """
    rows: list[Row] = []
    for prompt, group in zip(prompts, completions, strict=True):
        contexts, group_id = (prompt.token_ids,), first_sample_id + len(rows)
        rows += [Row(contexts, (sample,), group_id, sample.status, prompt.record) for sample in group]
    return pack_rows(rows, first_sample_id=first_sample_id)
