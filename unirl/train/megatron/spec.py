"""The layer spec of policy and critic: of our own parts, or of those of Transformer Engine where it is there."""

from dataclasses import dataclass

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
from unirl.train.megatron.platform import has_transformer_engine


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


@dataclass(frozen=True)
class LayerParts:
    """What layers are made of."""

    norm: type[torch.nn.Module] = RMSNorm
    column_parallel: type[torch.nn.Module] = ColumnParallelLinear
    row_parallel: type[torch.nn.Module] = RowParallelLinear
    attention: type[torch.nn.Module] = TreeAttention


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder: layers of this pipeline stage, or of its chunk `vp_stage`, and the final norm."""
    parts = _transformer_engine_parts(config) if has_transformer_engine() else LayerParts()
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config, parts)] * get_num_layers_to_build(config, vp_stage), layer_norm=parts.norm
    )


def _transformer_engine_parts(config: TransformerConfig) -> LayerParts:
    """Norms and linear layers stay apart, so that weights have the names that they have without it."""
    from megatron.core.extensions import transformer_engine as te

    from unirl.train.megatron.attention_te import PackedAttention

    attention = PackedAttention if config.context_parallel_size == 1 else TreeAttention
    return LayerParts(te.TENorm, te.TEColumnParallelLinear, te.TERowParallelLinear, attention)


def _layer_spec(config: TransformerConfig, parts: LayerParts) -> ModuleSpec:
    qk_norm = parts.norm if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=parts.column_parallel,
        core_attention=parts.attention,
        linear_proj=parts.row_parallel,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts.norm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=parts.norm,
            mlp=_mlp_spec(config, parts),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp_spec(config: TransformerConfig, parts: LayerParts) -> ModuleSpec:
    mlp = MLPSubmodules(linear_fc1=parts.column_parallel, linear_fc2=parts.row_parallel, activation_func=SwiGLU)
    if config.num_moe_experts:
        return moe_spec(mlp, grouped=config.moe_grouped_gemm)
    return ModuleSpec(module=MLP, submodules=mlp)
