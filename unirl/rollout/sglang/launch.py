"""How a server is launched: which interpreter, which command line, which environment."""

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unirl.errors import UserError
from unirl.rollout.sglang.control import STREAM_FORMAT

PYTHON_VARIABLE = "UNIRL_SGLANG_PYTHON"
DEFAULT_PYTHON = Path(".venv-sglang/bin/python")
CPU_STUBS = Path(__file__).parent / "cpu_stubs"

# Of the trainer's environment, what would mislead the server: its packages are others, and so is its process group.
_NOT_INHERITED = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MASTER_ADDR", "MASTER_PORT"}
_NOT_INHERITED |= {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_CPU_MEM_FRACTION = 0.3


@dataclass(frozen=True)
class ServerOptions:
    """What one server is started with.

    python: interpreter of an environment that has SGLang.
    host: address of its machine that it listens on, and on no other.
    gpus: devices of the node that the server may use, one for each TP rank; empty on CPU.
    max_running: samples decoded at once. mem_fraction: share of the device's memory for weights and cache.
    max_total_tokens: of the cache.
    deterministic: a sample depends on its own seed (see docs/rollout_engines.md).
    release_memory: it may be asked to release its memory for a while.
    arguments: further options of `sglang.launch_server` by name with underscores; they replace those made here.
    """

    python: str
    model_path: str
    dtype: str
    log_path: Path
    host: str = "127.0.0.1"
    device: str = "cpu"
    tp: int = 1
    gpus: tuple[int, ...] = ()
    max_running: int = 64
    mem_fraction: float | None = None
    max_total_tokens: int | None = None
    num_threads: int = 1
    deterministic: bool = True
    trust_remote_code: bool = False
    health_timeout_s: float = 60.0
    release_memory: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


def find_python(configured: str | None) -> str:
    """Interpreter of `rollout.python`, of $UNIRL_SGLANG_PYTHON, or of the environment that `make sglang` makes.

    Raises UserError where there is none.
    """
    asked = configured or os.environ.get(PYTHON_VARIABLE)
    path = Path(asked) if asked else DEFAULT_PYTHON
    if os.access(path, os.X_OK) and path.is_file():
        return str(path.absolute())  # not resolved: a link to the base interpreter is what makes an environment
    named = f"rollout.python={configured}" if configured else f"{PYTHON_VARIABLE}={asked}" if asked else str(path)
    raise UserError(
        f"{named}: no such interpreter. SGLang runs in an environment of its own: make one with `make sglang` (CPU), "
        f"or name its interpreter in rollout.python or {PYTHON_VARIABLE}"
    )


def command_line(options: ServerOptions, port: int, key_file: Path) -> list[str]:
    """The server's command; its API key stands in `key_file` (`api-key: ...`), never in the command."""
    arguments: dict[str, Any] = {
        "model_path": options.model_path,
        "host": options.host,
        "port": port,
        "device": options.device,
        "tp_size": options.tp,
        "dtype": options.dtype,
        "mem_fraction_static": options.mem_fraction,
        "max_running_requests": options.max_running,
        "max_total_tokens": options.max_total_tokens,
        "enable_deterministic_inference": options.deterministic,
        "trust_remote_code": options.trust_remote_code,
        "enable_memory_saver": options.release_memory and options.device == "cuda",  # nothing to do on CPU
        "incremental_streaming_output": True,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "skip_server_warmup": True,
        "log_level_http": "warning",
        **(_cpu_arguments(options) if options.device == "cpu" else {}),
        **options.arguments,
    }
    command = [options.python, "-m", "sglang.launch_server", "--config", str(key_file)]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif isinstance(value, list | tuple):
            command += [flag, *map(str, value)]
        elif value is not None and value is not False:
            command += [flag, str(value)]
    return command


def _cpu_arguments(options: ServerOptions) -> dict[str, Any]:
    return {
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,  # else it takes a core from the trainer while it waits
        "mem_fraction_static": options.mem_fraction or _CPU_MEM_FRACTION,
        "custom_weight_loader": [STREAM_FORMAT],
    }


def environment(options: ServerOptions) -> dict[str, str]:
    """Environment variables of the server."""
    env = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    bypass = [value for name in ("no_proxy", "NO_PROXY") if (value := os.environ.get(name))]
    ours = dict.fromkeys(["127.0.0.1", "localhost", options.host])
    env["no_proxy"] = env["NO_PROXY"] = ",".join([*bypass, *ours])
    # Ours is the limit that counts.
    env["SGLANG_HEALTH_CHECK_TIMEOUT"] = str(int(options.health_timeout_s) + 5)
    if Path(options.model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if options.device == "cpu":
        env |= {"PYTHONPATH": str(CPU_STUBS), "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        env["OMP_NUM_THREADS"] = str(options.num_threads)
        if options.tp > 1:  # SGLang gives ranks a NUMA node each, unless it is told their cores
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores_by_rank(options))
    elif options.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, options.gpus))
    return env


def _cores_by_rank(options: ServerOptions) -> str:
    """As many cores for each rank as it has threads, in SGLang's notation; shared ones where there are too few."""
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    ranks = (itertools.islice(cores, options.num_threads) for _ in range(options.tp))
    return "|".join(",".join(map(str, rank)) for rank in ranks)
