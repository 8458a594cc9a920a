"""One sample on its way: what is asked for it, and what has come so far, whichever servers it came from."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unirl.rollout.sglang.client import RequestRefusedError
from unirl.rollout.sglang.control import ServerInfo
from unirl.types import Completion, GenerationRequest, SampleStatus

STREAM_TOKENS = 16
"""Tokens in one event of the stream: as many may have to be drawn again when a server is lost."""

_SEEDS = 2**63
_FIRST_VERSION = "default"


@dataclass(frozen=True)
class Room:
    """Tokens that every server takes: `whole` in a sample, `prompt` of them in what is sent."""

    whole: int
    prompt: int

    @staticmethod
    def of(servers: Sequence[ServerInfo], max_positions: int) -> "Room":
        return Room(
            whole=min(max_positions, *(server.context_length for server in servers)),
            prompt=min(max_positions - 1, *(server.max_prompt_tokens for server in servers)),
        )


class Sample:
    """Collects the tokens of one sample, number `seed_index` of `request`.

    It may be asked for several times, each time for what is missing: the tokens it has become part of the prompt. A
    token's noise depends on the seed and the token's position, so that the parts fit together.
    """

    def __init__(self, request: GenerationRequest, seed_index: int, room: Room):
        self.request = request
        self.seed = request.seeds[seed_index] % _SEEDS
        self.limit = min(request.params.max_new_tokens, room.whole - len(request.prompt_ids))
        self._room = room
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.weight_versions: list[int] = []
        self.support: list[array] = []
        self.status: SampleStatus | None = None
        self._asked_at = 0

    def body(self) -> dict[str, Any]:
        """The request to `/generate` for the tokens that are missing."""
        params = self.request.params
        self._asked_at = len(self.token_ids)
        return {
            "input_ids": [*self.request.prompt_ids, *self.token_ids],
            "stream": True,
            # The support comes with log-probs of its own, renormalised over it.
            "return_logprob": not params.return_support,
            "return_sampling_mask": params.return_support,
            "sampling_params": {
                "max_new_tokens": self.limit - len(self.token_ids),
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,  # without it the model's generation_config would narrow the sampling
                "stop_token_ids": list(params.stop_token_ids),
                "ignore_eos": not params.stop_token_ids,
                "sampling_seed": self.seed,
                "stream_interval": STREAM_TOKENS,
            },
        }

    def take(self, event: dict[str, Any]) -> None:
        """Add the tokens of one event of the stream.

        Raises RequestRefusedError where the server ended the sample with an error.
        """
        meta = event["meta_info"]
        reason = meta.get("finish_reason")
        if reason is not None and reason["type"] == "abort" and reason.get("status_code"):
            raise RequestRefusedError(f"the server gave up a sample: {reason.get('message')}")
        token_ids = event["output_ids"]
        self.token_ids += token_ids
        if self.request.params.return_support:
            self._take_support(len(token_ids), meta)
        else:
            entries = _last(len(token_ids), meta.get("output_token_logprobs", ()))
            self.log_probs += [math.nan if entry[0] is None else entry[0] for entry in entries]
        self.weight_versions += [_version(meta["weight_version"])] * len(token_ids)
        for span in meta.get("weight_versions", ()):
            start = self._asked_at + span["start"]
            end = min(self._asked_at + span["end"], len(self.token_ids))
            self.weight_versions[start:end] = [_version(span["version"])] * (end - start)
        if reason is not None:
            self._finish(reason["type"])

    def _take_support(self, count: int, meta: dict[str, Any]) -> None:
        """The tokens that each of the last `count` tokens was drawn from, as the server's sampler had them."""
        if count and "output_token_sampling_mask" not in meta:
            raise RequestRefusedError("the server does not say what it sampled from: replay needs SGLang 0.5.23")
        self.support += [array("i", row) for row in _last(count, meta.get("output_token_sampling_mask", ()))]
        self.log_probs += _last(count, meta.get("output_token_sampling_logprobs", ()))

    def close_if_complete(self) -> None:
        """Note that nothing is missing, where the server was lost between the last token and the word that it was; or
        that there is no room to ask for more.
        """
        if self.token_ids and self.token_ids[-1] in self.request.params.stop_token_ids:
            self.status = SampleStatus.COMPLETED
        elif (
            len(self.token_ids) >= self.limit or len(self.request.prompt_ids) + len(self.token_ids) > self._room.prompt
        ):
            self.status = SampleStatus.TRUNCATED

    def _finish(self, kind: str) -> None:
        """A stop at a token that was not asked for, the model's own end token, leaves the sample open: it goes on."""
        if kind == "abort":
            self.status = SampleStatus.ABORTED
        elif kind == "length":
            self.status = SampleStatus.TRUNCATED
        elif kind == "stop":
            self.close_if_complete()
        else:
            raise RequestRefusedError(f"the server ended a sample with the reason {kind!r}, which is not known")

    def completion(self) -> Completion:
        """The sample; `status` must be known."""
        return Completion(
            token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs),
            status=self.status,
            weight_versions=tuple(self.weight_versions),
            support=tuple(self.support) if self.request.params.return_support else None,
        )


def _last(count: int, values: Sequence) -> Sequence:
    """The last `count` values: an event brings those of its own tokens, or of all tokens so far."""
    return values[len(values) - count :]


def _version(text: str) -> int:
    """Weight versions are integers here and texts there; a server starts with a name of its own."""
    return 0 if text == _FIRST_VERSION else int(text)
