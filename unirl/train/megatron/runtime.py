"""The process group and Megatron's parallel state of a process that hosts an actor."""

import os
from contextlib import AbstractContextManager

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from unirl.config.schema import ParallelConfig
from unirl.errors import UserError
from unirl.train.megatron.moe import EXPERT_TP
from unirl.train.megatron.platform import install_cpu_platform


class ParallelRuntime(AbstractContextManager):
    """Holds the groups of one layout; actors of one process share them, the last one to close takes them down."""

    _holders = 0
    _owns_process_group = False

    def __init__(self, parallel: ParallelConfig, *, seed: int):
        """Makes a process group of this process alone, without a network, unless there is a group already.

        Raises UserError where a launcher started several processes, RuntimeError where this process already hosts an
        actor of another layout.
        """
        install_cpu_platform()
        cls = type(self)
        if not dist.is_initialized():
            _init_process_group()
            cls._owns_process_group = True
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tp,
                pipeline_model_parallel_size=parallel.pp,
                context_parallel_size=parallel.cp,
                expert_model_parallel_size=parallel.ep,
                expert_tensor_parallel_size=EXPERT_TP,
                create_gloo_process_groups=False,
            )
        _check_layout(parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        cls._holders += 1
        self._open = True

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        cls = type(self)
        cls._holders -= 1
        if cls._holders == 0:
            parallel_state.destroy_model_parallel()
            if cls._owns_process_group:
                dist.destroy_process_group()
                cls._owns_process_group = False

    def __exit__(self, *exc_info) -> None:
        self.close()


def _init_process_group() -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise UserError(f"WORLD_SIZE={world_size} in the environment: the trainer runs as one process, start it alone")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _check_layout(parallel: ParallelConfig) -> None:
    found = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }
    asked = {name: getattr(parallel, name) for name in found}
    if found != asked:
        raise RuntimeError(
            f"this process hosts an actor with the parallel sizes {found}, asked for {asked}: close that one first"
        )
