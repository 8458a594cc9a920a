"""Mixture of experts: Megatron's config of it and the layer spec of its MLP, with and without Transformer Engine.

Routing is that of Hugging Face (`norm_topk_prob` or not), without auxiliary loss, capacity or dropped tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec

from unirl.config.schema import ParallelConfig
from unirl.train.megatron.architecture import MixtureOfExperts


def expert_tp(parallel: ParallelConfig) -> int:
    """Tensor-parallel size of the experts: whole experts on each expert-parallel rank, else cut as the rest is."""
    return 1 if parallel.ep > 1 else parallel.tp


class Router(TopKRouter):
    """Megatron's router with the logits of Hugging Face: a matrix product in the dtype of the weights.

    Megatron's own product needs Transformer Engine (0.16.1 looks for a function of it without importing it).
    """

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight)


def moe_options(moe: MixtureOfExperts | None, parallel: ParallelConfig, *, transformer_engine: bool) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig; none for a dense model."""
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        # Softmax over all experts and then the choice, or, the same as normalising the chosen, softmax over the chosen.
        "moe_router_pre_softmax": not moe.normalized,
        "moe_router_load_balancing_type": "none",
        "expert_tensor_parallel_size": expert_tp(parallel),
        "moe_grouped_gemm": transformer_engine,
        "moe_permute_fusion": transformer_engine,
    }


def moe_spec(expert: MLPSubmodules, *, grouped: bool) -> ModuleSpec:
    """The MLP of a layer, its experts run one after the other, or all those of a rank in one grouped matrix product of
    Transformer Engine, which then has only the activation of `expert`.
    """
    module = SequentialMLP
    if grouped:
        from megatron.core.extensions import transformer_engine as te

        module = TEGroupedMLP
        expert = MLPSubmodules(
            linear_fc1=te.TEColumnParallelGroupedLinear,
            linear_fc2=te.TERowParallelGroupedLinear,
            activation_func=expert.activation_func,
        )
    experts = ModuleSpec(module=module, submodules=expert)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=Router))
