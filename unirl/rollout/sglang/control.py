"""What can be asked of a server beside samples: its state, its weights, a pause, its memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unirl.rollout.sglang.client import SGLangClient

QUICK_S = 60.0
"""Limit in seconds of a request that only changes a state."""

MEMORY = ("kv_cache", "weights")
"""Parts of a server's memory that can be given back for a while."""

STREAM_FORMAT = "unirl_stream"
"""The `load_format` of updates by tensor or broadcast that bring all weights in one request (see `cpu_stubs`)."""

PauseMode = Literal["abort", "retract", "in_place"]
"""What a pause does with samples in progress: end them as aborted; take them out of the batch, their cache given up; or
leave them where they are, cache kept.
"""


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself.

    context_length: tokens of the longest sample, prompt counted. max_prompt_tokens: of the longest prompt, a bit fewer.
    device, dtype: of the weights. tp: ranks that share them. deterministic: it takes samples' seeds.
    weight_version: text that the last weight update came with; `default` before the first. model_type: of its model's
    config. streams: it takes STREAM_FORMAT.
    """

    context_length: int
    max_prompt_tokens: int
    device: str
    dtype: str
    deterministic: bool
    tp: int
    weight_version: str
    model_type: str
    streams: bool


class ServerControl:
    """The control endpoints of one server. Each raises ServerLostError or RequestRefusedError with its answer."""

    def __init__(self, client: SGLangClient):
        self.client = client

    @property
    def url(self) -> str:
        return self.client.url

    async def health(self, timeout_s: float) -> None:
        """Returns where the server, with its scheduler, lives; an idle server decodes a token for it."""
        await self.client.get("/health", timeout_s=timeout_s)

    async def info(self) -> ServerInfo:
        """Read anew from the server."""
        server = await self.client.get("/server_info", timeout_s=QUICK_S)
        models = await self.client.get("/v1/models", timeout_s=QUICK_S)
        model = await self.client.get("/model_info", timeout_s=QUICK_S)
        return ServerInfo(
            context_length=models["data"][0]["max_model_len"],
            max_prompt_tokens=server["max_req_input_len"] - 1,  # it refuses prompts of that length
            device=server["device"],
            dtype=server["dtype"],
            deterministic=server["enable_deterministic_inference"],
            tp=server["tp_size"],
            weight_version=model["weight_version"],
            model_type=model["model_type"],
            streams=STREAM_FORMAT in (server.get("custom_weight_loader") or ()),
        )

    async def running(self) -> int:
        """Samples that the server decodes or has waiting."""
        loads = await self.client.get("/v1/loads", timeout_s=QUICK_S)
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads["loads"])

    async def flush_cache(self) -> None:
        """Forget all cached prefixes; refused while samples are in progress."""
        await self.client.post("/flush_cache", timeout_s=QUICK_S)

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding until `resume`; requests that come meanwhile wait."""
        await self.client.post("/pause_generation", {"mode": mode}, timeout_s=QUICK_S)

    async def resume(self) -> None:
        await self.client.post("/continue_generation", {}, timeout_s=QUICK_S)

    async def abort_all(self) -> None:
        """End all samples in progress as aborted; their tokens so far are kept."""
        await self.client.post("/abort_request", {"rid": "", "abort_all": True}, timeout_s=QUICK_S)

    async def release_memory(
        self, tags: Sequence[str] = ("kv_cache", "weights"), *, timeout_s: float = QUICK_S
    ) -> None:
        """Free the device memory of what is named; refused while samples are in progress."""
        await self.client.post("/release_memory_occupation", {"tags": list(tags)}, timeout_s=timeout_s)

    async def resume_memory(self, tags: Sequence[str] = MEMORY, *, timeout_s: float = QUICK_S) -> None:
        """Take it again; weights come back without values."""
        await self.client.post("/resume_memory_occupation", {"tags": list(tags)}, timeout_s=timeout_s)

    async def begin_weight_update(self) -> None:
        """Open the session that updates by tensor or broadcast take place in."""
        await self.client.post("/begin_weight_update", {}, timeout_s=QUICK_S)

    async def end_weight_update(self, *, timeout_s: float) -> None:
        await self.client.post("/end_weight_update", {}, timeout_s=timeout_s)

    async def update_weights(self, how: str, body: dict[str, Any], *, timeout_s: float | None) -> None:
        """`/update_weights_from_{how}` (disk, tensor, distributed); without a limit, the caller has one of his own."""
        await self.client.post(f"/update_weights_from_{how}", body, timeout_s=timeout_s)

    async def checksums(self, *, timeout_s: float) -> list[dict[str, str]]:
        """Of each TP rank: hash of every weight, by the server's own names (see `checksums.py`)."""
        answer = await self.client.post("/weights_checker", {"action": "checksum"}, timeout_s=timeout_s)
        ranks = sorted(answer["ranks"], key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        return [rank["checksums"] for rank in ranks]
