"""What is asked of a rollout engine and what it answers."""

from array import array
from dataclasses import dataclass
from enum import IntEnum


class SampleStatus(IntEnum):
    """How a sample ended, as the engine reported it (never guessed from lengths)."""

    COMPLETED = 0
    TRUNCATED = 1
    ABORTED = 2


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    `temperature` 0 means greedy decoding. `top_p` 1.0 and `top_k` -1 mean the full distribution. Decoding stops after
    `max_new_tokens`, or after a token of `stop_token_ids`, which is kept as the last token of the sample.

    return_support: completions say among which tokens each of theirs was drawn, and their log-probs are renormalised
    over these. Raises ValueError where that cannot be: without `top_k` >= 1, which bounds them, or at temperature 0.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    return_support: bool = False

    def __post_init__(self):
        if self.return_support and (self.top_k < 1 or self.temperature == 0):
            raise ValueError(f"return_support: expected top_k >= 1 and temperature > 0, found {self}")


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and the samples wanted from it: one sample for each entry of `seeds`.

    A sample's random stream is decided by its own seed (any non-negative integer) alone: not by the batch it is
    decoded in, nor by the engine's history. That makes resumed runs and other layouts draw the same samples.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One sample: generated tokens only, with the log-prob that each was drawn with.

    `log_probs[i]` = log p(token_ids[i] | prompt, token_ids[:i]) in nats, of `logits / temperature`, and of the plain
    logits where `temperature` is 0. `weight_versions[i]` is the version of the weights that drew token i.

    With `return_support`, `support[i]` (C ints) are the distinct tokens, `top_k` of them or fewer, that `top_k` and
    `top_p` left to draw token i from, in any order; `log_probs` are then of the softmax over these alone.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    status: SampleStatus
    weight_versions: tuple[int, ...]
    support: tuple[array, ...] | None = None
