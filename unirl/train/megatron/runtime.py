"""The process group and Megatron's parallel state of a process that hosts an actor."""

import os
from contextlib import AbstractContextManager, ExitStack

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from unirl.config.schema import ParallelConfig
from unirl.errors import UserError
from unirl.train.megatron.moe import expert_tp
from unirl.train.megatron.platform import choose_device, deterministic_algorithms, install_cpu_platform


class ParallelRuntime(AbstractContextManager):
    """Holds the groups of one layout; actors of one process share them, the last one to close takes them down.

    Ranks are laid out as Megatron does by default: tensor parallel varies fastest, then context, data, and last
    pipeline parallel. Expert-parallel groups are of successive ranks of a stage, whatever they are otherwise.
    """

    _holders = 0
    _on_close: ExitStack

    def __init__(self, parallel: ParallelConfig, *, seed: int):
        """Uses the default process group, on CPU where it is gloo alone, else on the CUDA device that is current;
        without one, makes one of this process alone, without a network.

        Raises UserError where a launcher started several processes that have no group, or their number does not fit
        the parallel sizes; RuntimeError where this process already hosts an actor of another layout.
        """
        self._open = False
        cls = type(self)
        if cls._holders == 0:
            with ExitStack() as opened:
                self._set_up(parallel, opened)
                cls._on_close = opened.pop_all()
        cls._holders += 1
        self._open = True
        with ExitStack() as on_error:
            on_error.callback(self.close)
            _check_layout(parallel)
            self.device = choose_device()
            tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
            on_error.pop_all()

    @staticmethod
    def _set_up(parallel: ParallelConfig, opened: ExitStack) -> None:
        if parallel.deterministic:
            opened.enter_context(deterministic_algorithms())
        if not dist.is_initialized():
            _init_process_group()
            opened.callback(dist.destroy_process_group)
        if choose_device().type == "cpu":
            install_cpu_platform()
        if not parallel_state.model_parallel_is_initialized():
            _check_world_size(parallel)
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tp,
                pipeline_model_parallel_size=parallel.pp,
                virtual_pipeline_model_parallel_size=parallel.vpp,
                context_parallel_size=parallel.cp,
                expert_model_parallel_size=parallel.ep,
                expert_tensor_parallel_size=expert_tp(parallel),
                distributed_timeout_minutes=parallel.timeout_s / 60,
                create_gloo_process_groups=False,
            )
        opened.callback(parallel_state.destroy_model_parallel)

    @property
    def dp(self) -> int:
        """Data-parallel size: how many replicas of the model share a batch."""
        return parallel_state.get_data_parallel_world_size()

    @property
    def dp_rank(self) -> int:
        """The replica that this process is a part of; it runs the micro-batches of this index."""
        return parallel_state.get_data_parallel_rank()

    @property
    def reports(self) -> bool:
        """Whether this process is the one of its replica whose results count: every replica has exactly one."""
        return (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        cls = type(self)
        cls._holders -= 1
        if cls._holders == 0:
            cls._on_close.close()

    def __exit__(self, *exc_info) -> None:
        self.close()


def _init_process_group() -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise UserError(
            f"WORLD_SIZE={world_size} in the environment, but there is no process group: start one process, "
            "num_devices says how many ranks it starts"
        )
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _check_world_size(parallel: ParallelConfig) -> None:
    unit, found = parallel.tp * parallel.pp * parallel.cp, dist.get_world_size()
    if found % unit:
        raise UserError(
            f"parallel.tp * parallel.pp * parallel.cp = {parallel.tp} * {parallel.pp} * {parallel.cp} = {unit} does "
            f"not divide the {found} process(es) of this group: start a multiple of {unit} (num_devices)"
        )
    if found // parallel.pp % parallel.ep:
        raise UserError(
            f"parallel.ep={parallel.ep} does not divide the {found // parallel.pp} process(es) of a pipeline stage"
        )


def _check_layout(parallel: ParallelConfig) -> None:
    found = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    }
    asked = {name: getattr(parallel, name) for name in found}
    if found != asked:
        raise RuntimeError(
            f"this process hosts an actor with the parallel sizes {found}, asked for {asked}: close that one first"
        )
