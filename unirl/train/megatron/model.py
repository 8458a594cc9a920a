"""Policy and critic as Megatron-Core GPTModels: packed micro-batches in, logits or values of response tokens out."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from unirl.config.schema import ParallelConfig
from unirl.train.megatron.architecture import Architecture
from unirl.train.megatron.attention import TreePackedSeqParams, plan_attention
from unirl.train.megatron.moe import moe_options
from unirl.train.megatron.rope import RopeConfig
from unirl.train.megatron.spec import block_spec
from unirl.train.packing import MicroBatch

VOCAB_MULTIPLE = 128
"""Under tensor parallelism each shard of the vocabulary is a multiple of this."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding: the vocabulary as it is without tensor parallelism, else padded to equal shards."""
    multiple = VOCAB_MULTIPLE * tp if tp > 1 else 1
    return -(-vocab_size // multiple) * multiple


def transformer_config(
    architecture: Architecture, parallel: ParallelConfig, *, dtype: torch.dtype, recompute: str = "none"
) -> TransformerConfig:
    """Megatron's config of the policy; `recompute` as `stack.recompute`."""
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # Megatron's name for: the activation module of the layer spec
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=parallel.pp > 1,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it, experts or not
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The loss is divided by denominators of the whole batch already; this keeps Megatron from dividing again.
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        perform_initialization=False,  # every weight is read from the Hugging Face folder
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **moe_options(architecture.moe, transformer_engine=False),
        **_RECOMPUTE[recompute],
    )


_RECOMPUTE = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def packed_params(batch: MicroBatch, rope: RopeConfig) -> TreePackedSeqParams:
    """What the layers need of a micro-batch, computed once for all of them."""
    cu_seqlens = batch.tree_cu_seqlens.int()
    longest = int(batch.tree_cu_seqlens.diff().max())
    cos, sin = rope.cos_sin(batch.position_ids)
    return TreePackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        plan=plan_attention(batch.tree_cu_seqlens, batch.branch_ids),
        rope_cos=cos,
        rope_sin=sin,
        predict_positions=batch.predict_positions,
    )


class PackedModel(GPTModel):
    """GPTModel that runs packed micro-batches and applies its head where a response token is predicted, only there."""

    def __init__(self, architecture: Architecture, config: TransformerConfig):
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config),
            vocab_size=padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="none",  # our core attention applies RoPE
        )
        self.architecture = architecture

    def setup_embeddings_and_output_layer(self) -> None:
        """As GPTModel's, but a tied head on a stage of its own is not copied from the first one: it, too, is read from
        the folder. Their gradients are summed, and the norm counts the weight once.
        """
        if self.config.pipeline_model_parallel_size == 1 or not self.share_embeddings_and_output_weights:
            super().setup_embeddings_and_output_layer()
            return
        weight = self.shared_embedding_or_output_weight()
        if weight is not None:
            weight.shared_embedding = True
            weight.shared = not self.pre_process

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """What `head` makes of the hidden states that predict the response tokens; before the last pipeline stage,
        the hidden states of all tokens.
        """
        packed = packed_params(batch, self.architecture.rope)
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=batch.tokens[None], position_ids=batch.position_ids[None])
        hidden = self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=packed)
        return self.head(hidden.index_select(0, packed.predict_positions)) if self.post_process else hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, 1, H] of the final norm -> one row for each response token."""
        raise NotImplementedError


class PolicyModel(PackedModel):
    """The policy: its head gives logits [R, vocabulary of this rank], in the dtype of the weights.

    stores_logits: False leaves the head to the caller, who takes `head_weight` to the hidden states [R, H].
    """

    stores_logits = True

    @property
    def head_weight(self) -> torch.Tensor:
        """[vocabulary of this rank, H]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.stores_logits:
            return hidden.squeeze(1)
        logits, _ = self.output_layer(hidden, weight=self.head_weight)
        return logits.squeeze(1)


class ValueHead(torch.nn.Module):
    """A scalar of each hidden state, float32 whatever the dtype of the trunk.

    It begins without bias and with normal weights of std 1 / (H + 1), drawn from `seed` alone: behind a norm the first
    values are about 1 / sqrt(H).
    """

    def __init__(self, hidden_size: int, *, seed: int):
        super().__init__()
        weight = torch.empty(1, hidden_size).normal_(
            std=1 / (hidden_size + 1), generator=torch.Generator().manual_seed(seed)
        )
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), self.weight, self.bias).squeeze(-1)


class ValueModel(PackedModel):
    """The critic: the trunk of a policy whose head gives values [R], float32."""

    def __init__(self, architecture: Architecture, config: TransformerConfig, *, seed: int):
        # Of a tied model Megatron allocates no vocabulary head, and none is looked for in the folder.
        super().__init__(replace(architecture, tied=True), config)
        self.share_embeddings_and_output_weights = False
        del self.output_layer
        self.value_head = ValueHead(config.hidden_size, seed=seed)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.value_head(hidden.squeeze(1))
