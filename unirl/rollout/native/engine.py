"""The native rollout engine: batched sampling in plain torch, in the process of the caller."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from unirl.rollout.engine import ProgressCallback
from unirl.rollout.native.config import ModelConfig
from unirl.rollout.native.decode import Batch, BatchDecoder, Sampled
from unirl.rollout.native.model import Decoder
from unirl.rollout.weights import check_weights, collect_weights, read_weights
from unirl.types import Completion, GenerationRequest, SampleStatus, SamplingParams

_Place = tuple[int, int]
"""Number of a request and number of a sample within it."""


class NativeRolloutEngine:
    """Samples from a Llama, Qwen2 or Qwen3 model that lives in this process; a `RolloutEngine`.

    A prompt passes through the model once for all its samples. The tokens of a sample depend on its seed alone; its
    log-probs vary with the batch by float rounding only.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        max_batch_size: int,
        num_threads: int | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """model_path: Hugging Face folder (`config.json`, safetensors).

        max_batch_size: samples decoded at once; more are decoded one batch after the other.
        num_threads: CPU threads of torch while generating; None leaves the process's setting.
        dtype: of weights, activations and cache; logits become float32 before any log-prob.

        Raises ValueError on an architecture that is not supported or weights that do not fit it.
        """
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size: found {max_batch_size}, expected at least 1")
        self.weight_version = 0
        self._max_batch_size = max_batch_size
        self._num_threads = num_threads
        self._metrics: dict[str, float] = {}
        self._model: Decoder | None = _load_model(Path(model_path), torch.device(device), dtype)

    def generate(
        self, requests: Sequence[GenerationRequest], on_progress: ProgressCallback | None = None
    ) -> list[list[Completion]]:
        """See `RolloutEngine.generate`. A sample also ends, truncated, where the model's positions end."""
        model = self._open_model()
        for number, request in enumerate(requests):
            _check_request(number, request, model.config)
        sampled: dict[_Place, Sampled] = {}
        with _torch_threads(self._num_threads):
            for places in _plan_batches(requests, self._max_batch_size):
                decoder = BatchDecoder(model, _make_batch(requests, places, model.config))
                sampled.update(zip(places, decoder.run(_shift(on_progress, len(sampled))), strict=True))
        return [
            [self._complete(sampled[number, sample]) for sample in range(len(request.seeds))]
            for number, request in enumerate(requests)
        ]

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `RolloutEngine.update_weights`. Values are copied and cast to the engine's dtype.

        A model with tied embeddings has no `lm_head.weight`. On an error no weight is changed; for that, all tensors
        are held until the last has come.
        """
        started = time.perf_counter()
        state = self._open_model().state_dict()
        found = collect_weights(weights)
        check_weights(found, state, f"update to version {version}")
        for name, tensor in found.items():
            state[name].copy_(tensor)
        self.weight_version = version
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        self._metrics = {"sync/gb_per_s": num_bytes / 1e9 / (time.perf_counter() - started)}

    def release_memory(self) -> None:
        """See `RolloutEngine.release_memory`: nothing, caches live only while samples are drawn."""

    def metrics(self) -> dict[str, float]:
        """See `RolloutEngine.metrics`: gigabytes of the model per second of the last weight update."""
        return self._metrics

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._model = None

    def _open_model(self) -> Decoder:
        if self._model is None:
            raise RuntimeError("the rollout engine is closed")
        return self._model

    def _complete(self, sample: Sampled) -> Completion:
        return Completion(
            token_ids=sample.token_ids,
            log_probs=sample.log_probs,
            status=SampleStatus.COMPLETED if sample.stopped else SampleStatus.TRUNCATED,
            weight_versions=(self.weight_version,) * len(sample.token_ids),
            support=sample.support,
        )


def _load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Decoder:
    config = ModelConfig.from_folder(folder)
    with torch.device("meta"):
        model = Decoder(config)
    weights = read_weights(folder, tied=config.tie_word_embeddings, dtype=dtype, device=device)
    check_weights(weights, model.state_dict(), str(folder))
    model.load_state_dict(weights, assign=True)
    return model.to(device).requires_grad_(False)


def _check_request(number: int, request: GenerationRequest, config: ModelConfig) -> None:
    """Raise ValueError where the model cannot run `request`."""
    prompt, params, where = request.prompt_ids, request.params, f"request {number}"
    if not 0 < len(prompt) < config.max_position_embeddings:
        raise ValueError(
            f"{where}: the prompt has {len(prompt)} tokens; expected at least 1 and fewer than "
            f"max_position_embeddings = {config.max_position_embeddings} of the model's config.json"
        )
    for what, ids in (("prompt_ids", prompt), ("stop_token_ids", params.stop_token_ids)):
        outside = [token for token in ids if not 0 <= token < config.vocab_size]
        if outside:
            raise ValueError(f"{where}: {what} has {outside[:5]}, outside the vocabulary of {config.vocab_size} tokens")
    if params.max_new_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
        raise ValueError(f"{where}: expected max_new_tokens >= 1, temperature >= 0 and 0 < top_p <= 1, found {params}")
    if params.return_support and params.top_k > config.vocab_size:
        raise ValueError(f"{where}: found top_k={params.top_k}, more than the vocabulary of {config.vocab_size} tokens")
    if any(seed < 0 for seed in request.seeds):
        raise ValueError(f"{where}: expected seeds >= 0, found {request.seeds}")


def _plan_batches(requests: Sequence[GenerationRequest], max_batch_size: int) -> Iterator[list[_Place]]:
    """Batches of params that are equal but for max_new_tokens, of even size, each sorted by prompt length (which keeps
    padding small).
    """

    def drawing(number: int) -> SamplingParams:
        return replace(requests[number].params, max_new_tokens=1)

    def by_params(number: int) -> tuple:
        return repr(drawing(number)), len(requests[number].prompt_ids)

    numbers = sorted(range(len(requests)), key=by_params)
    for _, same_params in groupby(numbers, key=drawing):
        places = [(number, sample) for number in same_params for sample in range(len(requests[number].seeds))]
        num_batches = -(-len(places) // max_batch_size)
        for batch in range(num_batches):
            yield places[batch * len(places) // num_batches : (batch + 1) * len(places) // num_batches]


def _make_batch(requests: Sequence[GenerationRequest], places: Sequence[_Place], config: ModelConfig) -> Batch:
    by_request = [(requests[number], len(list(group))) for number, group in groupby(number for number, _ in places)]
    asked = [requests[number] for number, _ in places]
    limits = [
        min(request.params.max_new_tokens, config.max_position_embeddings - len(request.prompt_ids))
        for request in asked
    ]
    return Batch(
        prompts=[request.prompt_ids for request, _ in by_request],
        counts=[count for _, count in by_request],
        seeds=[requests[number].seeds[sample] for number, sample in places],
        limits=limits,
        params=asked[0].params,
    )


def _shift(on_progress: ProgressCallback | None, done: int) -> ProgressCallback:
    """A callback for one batch, when `done` samples were finished before it."""
    return lambda finished: None if on_progress is None else on_progress(done + finished)


@contextmanager
def _torch_threads(num_threads: int | None) -> Iterator[None]:
    """Run the body with that many CPU threads and restore the setting; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
