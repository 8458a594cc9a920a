"""From prompts to a `Part`: seeds, requests, and the packing of what an engine answers."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch

from unirl.rollout.engine import ProgressCallback, RolloutEngine
from unirl.types import Completion, GenerationRequest, Part, SamplingParams, TextSegment


class Prompt(Protocol):
    """What is needed of a prompt: the token ids that are sent, and its record (`prompt`, `answer`, ...)."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def record(self) -> dict[str, Any]: ...


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
    counts = np.array([len(group) for group in completions], dtype=np.int64)
    samples = [completion for group in completions for completion in group]
    prompt_of_sample = np.repeat(np.arange(len(prompts)), counts)
    prompt_ids = [tuple(prompt.token_ids) for prompt in prompts]
    for completion in samples:
        if not len(completion.token_ids) == len(completion.log_probs) == len(completion.weight_versions):
            raise ValueError(
                f"completion: found {len(completion.token_ids)} tokens, {len(completion.log_probs)} log-probs and "
                f"{len(completion.weight_versions)} weight versions, expected as many of each"
            )

    prompt_lengths = np.array([len(ids) for ids in prompt_ids], dtype=np.int64)[prompt_of_sample]
    generated_lengths = np.array([len(completion.token_ids) for completion in samples], dtype=np.int64)
    # Prompt and generated tokens alternate, sample after sample.
    span_lengths = np.stack([prompt_lengths, generated_lengths], axis=1).reshape(-1)
    generated = np.repeat(np.tile([False, True], len(samples)), span_lengths)

    def spread(values: Iterable[Iterable], dtype: type, elsewhere: float) -> torch.Tensor:
        """Values of the generated tokens, with `elsewhere` on the prompts' tokens."""
        spread = np.full(len(generated), elsewhere, dtype=dtype)
        spread[generated] = _flat(values, dtype, int(generated_lengths.sum()))
        return torch.from_numpy(spread)

    spans = chain.from_iterable((prompt_ids[p], c.token_ids) for p, c in zip(prompt_of_sample, samples, strict=True))
    sample_ids = torch.arange(first_sample_id, first_sample_id + len(samples))
    text = TextSegment(
        tokens=torch.from_numpy(_flat(spans, np.int64, len(generated))),
        log_probs=spread((c.log_probs for c in samples), np.float32, 0.0),
        loss_mask=torch.from_numpy(generated),
        turn_ids=torch.from_numpy(np.where(generated, 0, -1)),
        weight_versions=spread((c.weight_versions for c in samples), np.int64, -1),
        lengths=torch.from_numpy(prompt_lengths + generated_lengths),
        sample_ids=sample_ids,
        group_ids=torch.from_numpy(first_sample_id + (counts.cumsum() - counts)[prompt_of_sample]),
        episode_ids=sample_ids.clone(),
        status=torch.tensor([int(completion.status) for completion in samples], dtype=torch.int64),
    )
    return Part(text=text, records=tuple(prompts[prompt].record for prompt in prompt_of_sample))


def _flat(spans: Iterable[Iterable], dtype: type, count: int) -> np.ndarray:
    return np.fromiter(chain.from_iterable(spans), dtype=dtype, count=count)
