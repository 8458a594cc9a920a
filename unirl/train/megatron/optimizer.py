"""AdamW through Megatron's optimizer: fp32 master weights, clipping by the global norm, a step skipped whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, clip_grads, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from unirl.config.schema import OptimizerConfig
from unirl.errors import UserError
from unirl.train.megatron.schedule import learning_rate


@dataclass(frozen=True)
class StepResult:
    """One call of `optimizer_step`: gradient norm before clipping, learning rate, and whether nothing was changed."""

    grad_norm: float
    lr: float
    skipped: bool


class PolicyOptimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) with a learning-rate schedule.

    Weight decay leaves out norms and biases (every weight of one dimension). A step whose gradient norm is not finite
    changes nothing: neither weights nor moments nor the schedule, which counts the steps that were made.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        config: OptimizerConfig,
        *,
        max_grad_norm: float,
        total_steps: int,
        dtype: torch.dtype,
    ):
        """chunks: what this process holds of the model. Raises UserError for `cpu_offload` where it cannot be."""
        distributed = chunks[0].ddp_config.use_distributed_optimizer
        if config.cpu_offload:
            _check_offload(chunks[0], distributed)
        self.config = config
        self.max_grad_norm = max_grad_norm
        self.total_steps = total_steps
        self.steps = 0
        self._megatron: MegatronOptimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=max_grad_norm,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=distributed,
                optimizer_cpu_offload=config.cpu_offload,
                optimizer_offload_fraction=1.0,
            ),
            list(chunks),
            use_gloo_process_groups=False,
        )
        self._owners = self._find_owners()

    def zero_grad(self) -> None:
        self._megatron.zero_grad()

    def step(self) -> StepResult:
        """Clip to the maximal norm and update the weights from the gradients of the last backward passes."""
        lr = learning_rate(self.config, self.steps + 1, self.total_steps)
        for group in self._megatron.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        self._megatron.prepare_grads()
        grad_norm = self._megatron.get_grad_norm()
        if not math.isfinite(grad_norm):
            return StepResult(grad_norm, lr, skipped=True)
        for part in self._megatron.chained_optimizers:
            clip_grads.clip_grad_by_total_norm_fp32(part.get_parameters(), self.max_grad_norm, grad_norm)
        self._megatron.step_with_ready_grads()
        self.steps += 1
        return StepResult(grad_norm, lr, skipped=False)

    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that make the updates, in a fixed order."""
        return [part.optimizer for part in self._megatron.chained_optimizers]

    def shard_of(self, parameter: torch.nn.Parameter) -> "OptimizerShard | None":
        """What this rank updates of one weight; None where it is other ranks that update all of it."""
        for part in self._megatron.chained_optimizers:
            if isinstance(part, DistributedOptimizer):
                if parameter in part.model_param_group_index_map:
                    group, index = part.model_param_group_index_map[parameter]
                    owned = part._get_model_param_range_map(parameter)["param"]
                    master = part.optimizer.param_groups[group]["params"][index]
                    return self._shard(master, owned.start, owned.end, is_share=True)
            else:
                master = getattr(parameter, "main_param", parameter)
                if master in self._owners:
                    return self._shard(master, 0, parameter.numel(), is_share=False)
        return None

    def start_over(self, steps: int) -> None:
        """Forget all moments and count `steps` steps as made."""
        self.steps = steps
        for optimizer in set(self._owners.values()):
            optimizer.state.clear()
            for group in optimizer.param_groups:
                if not isinstance(optimizer, torch.optim.AdamW):  # fused AdamW counts by group, torch's by weight
                    group["step"] = steps

    def _shard(self, master: torch.Tensor, start: int, stop: int, *, is_share: bool) -> "OptimizerShard":
        for part in self.torch_optimizers():
            if isinstance(part, HybridDeviceOptimizer):
                # With the offload it is a copy on the CPU that is updated, and copied back after each step.
                master = part.param_to_inner_param.get(master, master)
        return OptimizerShard(self._owners[master], master, start, stop, is_share)

    def _find_owners(self) -> dict[torch.Tensor, torch.optim.Optimizer]:
        """Of everything that is updated, the optimizer that does it."""
        optimizers: list[torch.optim.Optimizer] = []
        for part in self.torch_optimizers():
            optimizers += part.sub_optimizers if isinstance(part, HybridDeviceOptimizer) else [part]
        return {master: opt for opt in optimizers for group in opt.param_groups for master in group["params"]}


@dataclass(frozen=True)
class OptimizerShard:
    """Entries [start, stop) of a flattened weight, and what AdamW updates of them.

    master: float32, the weight itself where that is in float32.
    is_share: whether other replicas have other entries of the weight: of the distributed optimizer.
    """

    optimizer: torch.optim.Optimizer
    master: torch.Tensor
    start: int
    stop: int
    is_share: bool

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """exp_avg, exp_avg_sq and what else AdamW keeps; empty before the first step."""
        return self.optimizer.state.get(self.master, {})

    def set_moments(self, steps: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        """As after `steps` steps; both like `master`, which are kept and not copied."""
        state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        if isinstance(self.optimizer, torch.optim.AdamW):
            state["step"] = torch.tensor(float(steps))  # one for each: a shared one would count every weight
        self.optimizer.state[self.master] = state


def _check_offload(chunk: DistributedDataParallel, distributed: bool) -> None:
    if not next(chunk.parameters()).is_cuda:
        raise UserError(
            "optimizer.cpu_offload=true: the weights are in host memory already, there is no GPU to relieve; set it to "
            "false"
        )
    if not distributed:
        # Without it Megatron keeps a copy of the master weights on the GPU.
        raise UserError("optimizer.cpu_offload=true needs parallel.use_distributed_optimizer=true")
