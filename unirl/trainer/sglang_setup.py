"""Makes the SGLang engine of a run from its config."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from unirl.cluster.berth import Berth, HostLostError
from unirl.config.geometry import releases_memory
from unirl.config.schema import TrainConfig
from unirl.errors import UserError
from unirl.rollout.sglang import (
    API_KEY_VARIABLE,
    EngineOptions,
    FleetLimits,
    RunningServer,
    ServerLostError,
    ServerOptions,
    SGLangRolloutEngine,
    WeightTransfer,
    find_python,
    per_server,
    start_on_node,
)
from unirl.sync import DiskTransfer, DistributedTransfer, TensorTransfer
from unirl.train.megatron.hf_folder import resolve_folder


@dataclass(frozen=True)
class BerthLauncher:
    """Launches a server on the devices of the run that are its own; a `Launcher`."""

    berth: Berth
    options: ServerOptions

    def launch(self) -> RunningServer:
        """See `Launcher.launch`."""
        try:
            return self.berth.launch(partial(start_on_node, self.options))
        except HostLostError as error:
            raise ServerLostError(str(error)) from error

    def __str__(self) -> str:
        return f"of {self.options.log_path}"


def make_sglang_engine(config: TrainConfig, berths: Sequence[Berth] = ()) -> SGLangRolloutEngine:
    """Launch the servers of the section `rollout`, or attach to those of `rollout.urls`.

    berths: where each server is launched; none: on this machine.
    """
    rollout, folder = config.rollout, resolve_folder(config.model.path)
    return SGLangRolloutEngine(
        folder,
        rollout.urls or _sources(config, folder, berths),
        _make_transfer(config),
        limits=FleetLimits(
            max_concurrency=rollout.max_concurrency,
            start_timeout_s=rollout.start_timeout_s,
            health_interval_s=rollout.health_interval_s,
            health_timeout_s=rollout.health_timeout_s,
            max_restarts=rollout.max_restarts,
        ),
        options=EngineOptions(
            timeout_s=rollout.timeout_s,
            deterministic=rollout.deterministic,
            checksum_every=config.sync.checksum_every,
            checksum_timeout_s=config.sync.timeout_s,
            release_timeout_s=config.sync.timeout_s,
        ),
        api_key=os.environ.get(API_KEY_VARIABLE),
    )


def _sources(
    config: TrainConfig, folder: Path, berths: Sequence[Berth]
) -> Sequence[ServerOptions] | Sequence[BerthLauncher]:
    if not berths:
        return local_servers(config, folder, config.rollout.num_servers or 1)
    options = per_server(_server_options(config, folder, gpus=()), len(berths))
    return [BerthLauncher(*pair) for pair in zip(berths, options, strict=True)]


def local_servers(config: TrainConfig, folder: Path, count: int) -> list[ServerOptions]:
    """Options of `count` servers of the model in `folder` on the first GPUs of this machine.

    Raises UserError where it has too few.
    """
    rollout = config.rollout
    num_gpus = count * rollout.tp if _device(config) == "cuda" else 0
    if num_gpus > torch.cuda.device_count():
        raise UserError(
            f"rollout.num_servers={count} servers of rollout.tp={rollout.tp} GPUs need {num_gpus}, and "
            f"this machine has {torch.cuda.device_count()}: lower one of them, or set rollout.device=cpu"
        )
    return per_server(_server_options(config, folder, gpus=tuple(range(num_gpus))), count)


def _server_options(config: TrainConfig, folder: Path, gpus: tuple[int, ...]) -> ServerOptions:
    rollout = config.rollout
    return ServerOptions(
        python=find_python(rollout.python),
        model_path=str(folder.absolute()),
        dtype=config.model.dtype,
        log_path=Path(config.run_dir).absolute() / "logs" / "sglang.log",
        device=_device(config),
        tp=rollout.tp,
        gpus=gpus,
        max_running=rollout.max_concurrency,
        mem_fraction=rollout.mem_fraction,
        max_total_tokens=rollout.max_total_tokens,
        num_threads=config.num_threads or 1,
        deterministic=rollout.deterministic,
        trust_remote_code=config.model.trust_remote_code,
        health_timeout_s=rollout.health_timeout_s,
        release_memory=releases_memory(config),
        arguments=rollout.server_args,
    )


def _device(config: TrainConfig) -> str:
    device = config.rollout.device
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _make_transfer(config: TrainConfig) -> WeightTransfer:
    sync = config.sync
    limits = {"bucket_bytes": sync.bucket_mb * 10**6, "timeout_s": sync.timeout_s}
    if sync.mode == "tensor":
        return TensorTransfer(**limits)
    if sync.mode == "distributed":
        return DistributedTransfer(**limits)
    folder = Path(sync.folder) if sync.folder else Path(config.run_dir) / "weights"
    return DiskTransfer(folder, **limits)
