"""Attention by Transformer Engine, on GPU. Nothing here is imported where that is not installed."""

from megatron.core.extensions import transformer_engine as te
from megatron.core.packed_seq_params import PackedSeqParams

from unirl.train.megatron.attention import AttentionPlan, TreeAttention, TreePackedSeqParams
from unirl.train.megatron.rope import apply_rope


class PackedAttention(TreeAttention):
    """Core attention: RoPE from the positions of the micro-batch, then Transformer Engine's kernel where it fits."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **options):
        super().__init__(config, layer_number, attn_mask_type, attention_type, softmax_scale, **options)
        self.kernel = te.TEDotProductAttention(
            config, layer_number, attn_mask_type, attention_type, softmax_scale=softmax_scale, **options
        )
        self.mask_type = attn_mask_type

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params: TreePackedSeqParams, **options):
        """As `TreeAttention.forward`."""
        plan = packed_seq_params.plan
        if not isinstance(plan, AttentionPlan) or any(call.mask is not None for call in plan.calls):
            return super().forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params, **options)
        rope = packed_seq_params.rope_cos, packed_seq_params.rope_sin
        bounds = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=packed_seq_params.cu_seqlens_q,
            cu_seqlens_kv=packed_seq_params.cu_seqlens_kv,
            max_seqlen_q=packed_seq_params.max_seqlen_q,
            max_seqlen_kv=packed_seq_params.max_seqlen_kv,
        )
        query, key = apply_rope(query, *rope), apply_rope(key, *rope)
        output = self.kernel(query, key, value, None, attn_mask_type=self.mask_type, packed_seq_params=bounds)
        return output.reshape(output.shape[0], -1)
