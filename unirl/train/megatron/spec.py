"""The layer spec of the policy without Transformer Engine."""

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from unirl.train.megatron.attention import TreeAttention
from unirl.train.megatron.moe import moe_spec


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32; `weight` is marked for sequence parallel."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each tensor-parallel rank then sees a part of the sequence: Megatron sums this gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [..., 2F] -> [..., F], keeping only the input for the backward pass."""

    @staticmethod
    def forward(ctx, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        out_gate, out_up = out.chunk(2, -1)
        torch.mul(F.silu(gate), grad, out=out_up)
        out_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


class SwiGLU(torch.nn.Module):
    """The gated activation of the MLP: fc1's output is [gate; up]."""

    def __init__(self, config: TransformerConfig):
        super().__init__()

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _SwiGLU.apply(gate_up)


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder: layers of this pipeline stage, or of its chunk `vp_stage`, and the final norm."""
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config)] * get_num_layers_to_build(config, vp_stage), layer_norm=RMSNorm
    )


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=TreeAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_mlp_spec(config),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp_spec(config: TransformerConfig) -> ModuleSpec:
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=SwiGLU)
    if config.num_moe_experts:
        return moe_spec(mlp, grouped=config.moe_grouped_gemm)
    return ModuleSpec(module=MLP, submodules=mlp)
