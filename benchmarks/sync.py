"""Weight sync to a real SGLang server on this machine, beside the plainest way to move the same bytes.

    python -m benchmarks.sync --json=benchmarks/results/sync_cpu.json

A random model of about 1 GB (Qwen3 architecture, float32) goes to a server on CPU by every `sync.mode`. Beside them:

- memcpy: a copy of the same tensors within the process, in the same rounds (the measure of `tensor`)
- copies: two such copies at the same time, by two threads; a way through shared memory makes as many, since the trainer
  writes every byte there and the server reads it
- served: the stream of `tensor` with buckets that nobody fills, so what the server takes for itself
- tensor_each, distributed_each: SGLang's own updates, a request for each bucket
- gloo: a broadcast of the same buckets to a process that does nothing with them, before and after (the measure of
  `distributed`)

Medians over rounds; a ratio is that of the two medians. $UNIRL_SGLANG_PYTHON names the interpreter of the server, as in
a run.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from unirl.cluster.spawn import run_ranks
from unirl.rollout.sglang import EngineOptions, FleetLimits, ServerOptions, SGLangRolloutEngine, find_python
from unirl.rollout.weights import LocalWeights
from unirl.sync import DiskTransfer, DistributedTransfer, TensorTransfer
from unirl.sync.buckets import Buffers, Packer
from unirl.sync.shared_memory import allocate_shared, release_shared
from unirl.sync.stream import Readers
from unirl.sync.tensor import CACHED_BYTES

TARGETS = {"tensor": ("memcpy", 0.5), "distributed": ("gloo", 0.7)}
"""Mode -> what it is measured by, and the share of its throughput that is asked for."""


def make_model(folder: Path, num_layers: int) -> list[tuple[str, torch.Tensor]]:
    """Write the model; its weights."""
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Qwen3ForCausalLM(config).named_parameters()}
    weights = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return list(weights.items())


def memcpy(weights: list[tuple[str, torch.Tensor]]) -> Callable[[], None]:
    """Copies every weight to memory that is there already."""
    targets = [torch.zeros_like(tensor) for _, tensor in weights]

    def copy() -> None:
        for target, (_, tensor) in zip(targets, weights, strict=True):
            target.copy_(tensor)

    return copy


def two_copies(weights: list[tuple[str, torch.Tensor]]) -> Callable[[], None]:
    """Two copies of every weight at the same time."""
    copies, threads = [memcpy(weights), memcpy(weights)], ThreadPoolExecutor(2)
    return lambda: list(threads.map(lambda copy: copy(), copies))


class Served:
    """The stream of a sync by tensor, whose buckets are left as they are."""

    def __init__(self, engine: SGLangRolloutEngine, weights: list[tuple[str, torch.Tensor]]):
        self._engine = engine
        self._buffers = Buffers(allocate_shared, release_shared)
        packer = Packer(iter(weights), CACHED_BYTES, self._buffers)
        self._buckets = []
        while packer.has_more:
            self._buckets.append(packer.pack())

    def send(self) -> None:
        self._engine.run(self._send())

    async def _send(self) -> None:
        [control] = self._engine.controls
        await control.pause("retract")
        await control.begin_weight_update()
        async with Readers(1, 600) as readers:
            body = {**readers.request(1), "flush_cache": True}
            answered = asyncio.create_task(control.update_weights("tensor", body, timeout_s=600))
            await readers.all_here()
            for bucket in self._buckets:
                await readers.room()
                readers.tell(bucket)
            readers.tell_end()
            await answered
        await control.end_weight_update(timeout_s=600)
        await control.resume()

    def close(self) -> None:
        self._buffers.clear()


def broadcast_rank(num_bytes: int, bucket_bytes: int, rounds: int) -> list[float]:
    """Seconds of each round, on rank 0."""
    bucket = torch.ones(bucket_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(rounds + 1):  # the first one sets up
        dist.barrier()
        started = time.perf_counter()
        for start in range(0, num_bytes, bucket_bytes):
            dist.broadcast(bucket[: min(bucket_bytes, num_bytes - start)], src=0)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def measure(rounds: int, num_layers: int, bucket_mb: int) -> dict:
    """Seconds of every way, and what follows from them."""
    torch.set_num_threads(1)
    bucket_bytes = bucket_mb * 10**6
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        weights = make_model(folder / "model", num_layers)
        num_bytes = sum(tensor.nbytes for _, tensor in weights)
        limits = {"bucket_bytes": bucket_bytes, "timeout_s": 600}
        transfers = {
            "disk": DiskTransfer(folder / "weights", **limits),
            **{name: TensorTransfer(**limits) for name in ("tensor", "tensor_each")},
            **{name: DistributedTransfer(**limits) for name in ("distributed", "distributed_each")},
        }
        seconds = run_rounds(folder, weights, transfers, rounds, (num_bytes, bucket_bytes))
    return summary(seconds, num_bytes, bucket_mb)


def run_rounds(folder: Path, weights: list, transfers: dict, rounds: int, sizes: tuple[int, int]) -> dict:
    """The seconds of each way, by its name; the ways take turns."""
    options = ServerOptions(
        find_python(None),
        str(folder / "model"),
        "float32",
        folder / "log" / "sglang.log",
        max_running=4,
        arguments={"max_total_tokens": 512},
    )
    common = {"limits": FleetLimits(start_timeout_s=1200), "options": EngineOptions(checksum_every=0)}
    seconds: dict[str, list[float]] = defaultdict(list)
    engines = {"disk": SGLangRolloutEngine(folder / "model", [options], transfers["disk"], **common)}
    try:
        [(url, key)] = engines["disk"].endpoints
        for name in [name for name in transfers if name != "disk"]:
            engines[name] = SGLangRolloutEngine(folder / "model", [url], transfers[name], api_key=key, **common)
            [server] = engines[name]._fleet.servers
            server.info = replace(server.info, streams=not name.endswith("_each"))
        for engine in engines.values():
            engine.run(engine._fleet.keep_quiet())  # to give a sign of life a server decodes a token
        source = LocalWeights(lambda: weights)
        served = Served(engines["tensor"], weights)
        ways = {"memcpy": memcpy(weights), "copies": two_copies(weights), "served": served.send}
        ways |= {name: publish(engine, source) for name, engine in engines.items()}
        disk = {"disk": ways.pop("disk")}  # last, and alone: the kernel writes on for a while
        seconds["gloo"] += run_ranks(broadcast_rank, 2, *sizes, rounds // 2, timeout_s=600)[0]
        take_turns(ways, rounds, seconds)
        served.close()
        seconds["gloo"] += run_ranks(broadcast_rank, 2, *sizes, rounds - rounds // 2, timeout_s=600)[0]
        take_turns(disk, rounds, seconds)
    finally:
        for engine in reversed(engines.values()):
            engine._fleet.end_quiet()
            engine.close()
    return seconds


def take_turns(ways: dict[str, Callable[[], None]], rounds: int, seconds: dict[str, list[float]]) -> None:
    """Every way once in a round."""
    for round_number in range(rounds + 1):
        for name, act in ways.items():
            started = time.perf_counter()
            act()
            if round_number:  # the first one sets up
                seconds[name].append(time.perf_counter() - started)
        print({name: round(found[-1], 3) for name, found in seconds.items()}, flush=True)


def publish(engine: SGLangRolloutEngine, source: LocalWeights) -> Callable[[], None]:
    """The sync of one way as a whole."""
    return lambda: engine.update_weights(source, engine.weight_version + 1)


def summary(seconds: dict[str, list[float]], num_bytes: int, bucket_mb: int) -> dict:
    """Medians, throughputs and ratios."""
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "model_gb": round(num_bytes / 1e9, 3),
        "bucket_mb": bucket_mb,
        "rounds": len(seconds["memcpy"]),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "torch": torch.__version__,
        "tcp_congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "median_s": {name: round(value, 3) for name, value in medians.items()},
        "gb_per_s": {name: round(num_bytes / value / 1e9, 3) for name, value in medians.items()},
        "ratio": {name: round(medians[base] / medians[name], 3) for name, (base, _) in TARGETS.items()},
        "target": {name: share for name, (_, share) in TARGETS.items()},
        "seconds": {name: [round(value, 3) for value in found] for name, found in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=19, help="of the model; 19 make 0.99 GB")
    parser.add_argument("--bucket-mb", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.rounds, options.layers, options.bucket_mb)
    for name, value in found["gb_per_s"].items():
        ratio = found["ratio"].get(name)
        of = f"  {ratio:.0%} of {TARGETS[name][0]} (asked for: {TARGETS[name][1]:.0%})" if ratio else ""
        print(f"{name:12} {value:7.3f} GB/s{of}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
