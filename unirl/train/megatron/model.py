"""Policy and critic as Megatron-Core GPTModels: packed micro-batches in, logits or values of response tokens out."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from unirl.config.schema import ParallelConfig
from unirl.train.megatron.architecture import Architecture, check_layout
from unirl.train.megatron.attention import TreePackedSeqParams, plan_attention
from unirl.train.megatron.context import ContextSplit
from unirl.train.megatron.moe import moe_options
from unirl.train.megatron.platform import choose_device, has_transformer_engine
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
    """Megatron's config of the policy; `recompute` as `stack.recompute`.

    Raises UserError where the model cannot be split by the parallel sizes.
    """
    check_layout(architecture, parallel)
    interleaved = parallel.vpp is not None
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
        virtual_pipeline_model_parallel_size=parallel.vpp,
        variable_seq_lengths=parallel.pp > 1,
        # The interleaved schedule of two stages sends to the same rank in both directions: one message at a time then.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        deterministic_mode=parallel.deterministic,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it, experts or not
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The loss is divided by denominators of the whole batch already; this keeps Megatron from dividing again.
        calculate_per_token_loss=True,
        use_cpu_initialization=choose_device().type == "cpu",
        perform_initialization=False,  # every weight is read from the Hugging Face folder
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **moe_options(architecture.moe, parallel, transformer_engine=has_transformer_engine()),
        **_RECOMPUTE[recompute],
    )


_RECOMPUTE = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def packed_params(batch: MicroBatch, rope: RopeConfig, split: ContextSplit | None) -> TreePackedSeqParams:
    """What the layers need of a micro-batch, or of this rank's share of it, computed once for all of them."""
    cu_seqlens = batch.tree_cu_seqlens.int()
    longest = int(batch.tree_cu_seqlens.diff().max())
    cos, sin = rope.cos_sin(batch.position_ids if split is None else batch.position_ids[split.tokens])
    return TreePackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        plan=plan_attention(batch.tree_cu_seqlens, batch.branch_ids) if split is None else split.plan(),
        rope_cos=cos,
        rope_sin=sin,
        predict_positions=batch.predict_positions if split is None else split.predict_positions,
    )


class PackedModel(GPTModel):
    """GPTModel that runs packed micro-batches and applies its head where a response token is predicted, only there.

    It is what one pipeline stage holds of the model, or one chunk of that (`vp_stage`) in the interleaved schedule.
    """

    def __init__(self, architecture: Architecture, config: TransformerConfig, vp_stage: int | None = None):
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config, vp_stage),
            vocab_size=padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="none",  # our core attention applies RoPE
            vp_stage=vp_stage,
        )
        self.architecture = architecture
        _mark_tensor_parallel(self)
        if self.post_process and config.sequence_parallel:
            # The head gets hidden states of all ranks' tokens, see _predicting; it is like one without.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True

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
        """What `head` makes of the hidden states that predict the response tokens [R], under context parallelism those
        of this rank; before the last pipeline stage, the hidden states of all tokens of this rank.
        """
        split = context_split(batch)
        packed = packed_params(batch, self.architecture.rope, split)
        embedded = None
        if self.pre_process:
            tokens, positions = batch.tokens, batch.position_ids
            if split is not None:
                tokens, positions = tokens[split.tokens], positions[split.tokens]
            embedded = self.embedding(input_ids=tokens[None], position_ids=positions[None])
        hidden = self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=packed)
        return self.head(self._predicting(hidden, packed)) if self.post_process else hidden

    def _predicting(self, hidden: torch.Tensor, packed: TreePackedSeqParams) -> torch.Tensor:
        """[R, 1, H]: the hidden states that the head takes."""
        if self.config.sequence_parallel:
            # Every rank of the group gets the whole gradient behind this and keeps the part of its own tokens.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden.index_select(0, packed.predict_positions)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, 1, H] of the final norm -> one row for each response token."""
        raise NotImplementedError


def context_split(batch: MicroBatch) -> ContextSplit | None:
    """What this rank has of the micro-batch; None without context parallelism: everything."""
    size = parallel_state.get_context_parallel_world_size()
    return None if size == 1 else ContextSplit(batch, size, parallel_state.get_context_parallel_rank())


def _mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Say which weights are shards. Megatron does so when it draws weights, which are read from a folder here; a weight
    without the mark counts as a copy, and the norm of the gradients would miss all shards but the first.
    """
    dims = {VocabParallelEmbedding: 0, ColumnParallelLinear: 0, RowParallelLinear: 1}
    for module in model.modules():
        weight, dim = getattr(module, "weight", None), dims.get(type(module))
        if dim is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dim, 1)


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

    def __init__(
        self, architecture: Architecture, config: TransformerConfig, vp_stage: int | None = None, *, seed: int
    ):
        # Of a tied model no vocabulary head is looked for in the folder.
        super().__init__(replace(architecture, tied=True), config, vp_stage)
        self.share_embeddings_and_output_weights = False
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(config.hidden_size, seed=seed)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.value_head(hidden.squeeze(1))
