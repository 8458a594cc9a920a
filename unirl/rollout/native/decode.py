"""One batch of samples, from its prompts to its last token."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from unirl.rollout.engine import ProgressCallback
from unirl.rollout.native.cache import KVCache
from unirl.rollout.native.model import Decoder
from unirl.rollout.native.sampling import UniformStreams, draw
from unirl.types import SamplingParams

_PREFILL_TOKENS = 8192
"""Prompt tokens, padding included, that pass through the model at once: bounds the memory of activations."""

_COMPACTION_STEPS = 1
"""Decode steps that cost a row about as much as its share of a compaction."""


@dataclass(frozen=True)
class Batch:
    """P prompts, shortest first, and the B samples wanted from them, the samples of one prompt side by side.

    prompts: P token lists. counts: samples of each prompt, sum B. seeds: B. limits: B, most new tokens of each sample.
    """

    prompts: Sequence[Sequence[int]]
    counts: Sequence[int]
    seeds: Sequence[int]
    limits: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True)
class Sampled:
    """Generated ids of one sample, their log-probs, whether its last token is a stop token, and the support of each
    token as in a `Completion`.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    stopped: bool
    support: tuple[array, ...] | None


class BatchDecoder:
    """Decodes one `Batch`. Finished rows stay in the tensors until leaving them out pays for the copy."""

    def __init__(self, model: Decoder, batch: Batch):
        self._model, self._batch = model, batch
        device = model.frequencies.device
        prompt_lengths = torch.tensor([len(prompt) for prompt in batch.prompts])
        counts = torch.tensor(batch.counts)
        size, longest = len(batch.seeds), max(batch.limits)

        # Of the rows that are still decoded: R of them, B at first.
        self._rows = torch.arange(size, device=device)
        self._positions = prompt_lengths.repeat_interleave(counts).to(device)
        self._limits = torch.tensor(batch.limits, device=device)
        self._alive = torch.ones(size, dtype=torch.bool, device=device)
        self._idle_steps = 0
        self._streams = UniformStreams(batch.seeds, device)
        max_slots = int(prompt_lengths.max()) + longest - 1  # the last token is drawn but never decoded
        self._cache = KVCache(model.config, self._positions, max_slots, like=model.model.embed_tokens.weight)

        # Of all B samples, step by step; memory of steps that are never reached is never touched.
        self._tokens = torch.empty(longest, size, dtype=torch.int64, device=device)
        self._log_probs = torch.empty(longest, size, dtype=torch.float32, device=device)
        self._support = None
        if batch.params.return_support:
            self._support = torch.empty(longest, size, batch.params.top_k, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(size, dtype=torch.int64, device=device)
        self._is_stop = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=device)
        self._is_stop[list(batch.params.stop_token_ids)] = True

    @torch.inference_mode()
    def run(self, on_progress: ProgressCallback) -> list[Sampled]:
        """Sample all rows. Raises FloatingPointError when the model gives logits that are not finite."""
        logits = self._prefill()
        for step in range(len(self._tokens)):
            tokens = self._draw(step, logits)
            num_alive = int(self._alive.sum())
            on_progress(len(self._lengths) - num_alive)
            if num_alive == 0:
                break
            self._idle_steps += len(tokens) - num_alive
            if self._idle_steps >= _COMPACTION_STEPS * num_alive:
                tokens = self._compact(tokens)
            logits = self._step(tokens)
        return list(self._samples())

    def _prefill(self) -> torch.Tensor:
        """Store keys and values of all prompts; logits [B, V] that follow them."""
        logits = []
        row = 0
        for first, last in _prefill_spans([len(prompt) for prompt in self._batch.prompts]):
            counts = torch.tensor(self._batch.counts[first:last], device=self._rows.device)
            rows = slice(row, row + sum(self._batch.counts[first:last]))
            prompt_of_row = torch.arange(last - first, device=counts.device).repeat_interleave(counts)
            logits.append(self._prefill_prompts(self._batch.prompts[first:last], rows, prompt_of_row))
            row = rows.stop
        return torch.cat(logits)

    def _prefill_prompts(
        self, prompts: Sequence[Sequence[int]], rows: slice, prompt_of_row: torch.Tensor
    ) -> torch.Tensor:
        device = prompt_of_row.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        tokens = torch.tensor([[*prompt, *[0] * (len(prompts[-1]) - len(prompt))] for prompt in prompts], device=device)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # The padding stands behind the prompts, where causal attention keeps it out of them without a mask.
            self._cache.put_prompts(layer, k, v, lengths, rows, prompt_of_row)
            q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)

        hidden = self._model(tokens, torch.arange(tokens.shape[1], device=device), attend)
        last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
        return self._model.logits(last)[prompt_of_row]

    def _step(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [R] -> logits [R, V] of the tokens that follow."""
        self._cache.open_slot()
        hidden = self._model(tokens, self._positions, self._cache.attend)
        self._positions = self._positions + 1
        return self._model.logits(hidden)

    def _draw(self, step: int, logits: torch.Tensor) -> torch.Tensor:
        """Draw and record the tokens [R] of this step, and mark the rows that end with them."""
        tokens, log_probs, support = draw(logits, self._streams.next(), self._batch.params)
        # Rows that are finished but not yet dropped write behind the end of their sample, where nothing is read.
        self._tokens[step].index_copy_(0, self._rows, tokens)
        self._log_probs[step].index_copy_(0, self._rows, log_probs)
        if support is not None:
            self._support[step].index_copy_(0, self._rows, support)
        self._lengths.index_add_(0, self._rows, self._alive.long())
        self._alive &= ~self._is_stop[tokens] & (self._limits > step + 1)
        return tokens

    def _compact(self, tokens: torch.Tensor) -> torch.Tensor:
        """Drop the finished rows; the tokens of those that remain."""
        kept = self._alive.nonzero().squeeze(1)
        self._cache.keep(kept)
        self._streams.keep(kept)
        self._rows, self._positions, self._limits = self._rows[kept], self._positions[kept], self._limits[kept]
        self._alive = self._alive[kept]
        self._idle_steps = 0
        return tokens[kept]

    def _samples(self) -> Iterator[Sampled]:
        lengths = self._lengths.tolist()
        longest = max(lengths)
        stopped = self._is_stop[self._tokens.gather(0, self._lengths[None] - 1)[0]].tolist()
        tokens, log_probs = (steps[:longest].T.contiguous().cpu() for steps in (self._tokens, self._log_probs))
        for row, length in enumerate(lengths):
            support = None if self._support is None else _ragged(self._support[:length, row].cpu())
            yield Sampled(
                tuple(tokens[row, :length].tolist()), tuple(log_probs[row, :length].tolist()), stopped[row], support
            )


def _ragged(support: torch.Tensor) -> tuple[array, ...]:
    """support [L, K] int32 -> of each row what is not -1."""
    return tuple(array("i", [token for token in row if token >= 0]) for row in support.tolist())


def _prefill_spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Spans [first, last) of prompts that pass through the model together; `lengths` ascend."""
    first = 0
    for last, length in enumerate(lengths):
        if first < last and (last + 1 - first) * length > _PREFILL_TOKENS:
            yield first, last
            first = last
    yield first, len(lengths)
