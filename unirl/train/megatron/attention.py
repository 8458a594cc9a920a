"""Attention over packed trees: RoPE from explicit positions, and few batched calls for many short sequences."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.bias import causal_lower_right

from unirl.train.megatron.context import ContextCall, ContextPlan, gather_tokens
from unirl.train.megatron.rope import apply_rope

MAX_PADDING = 1.25
"""A batched call holds at most this many times the tokens of its trees."""
MAX_CALL_TOKENS = 65_536
"""Tokens of a batched call, padding counted, unless it holds one tree alone."""
MAX_MASK_ENTRIES = 2**24
"""Entries of a batched call's mask (trees with branches), unless it holds one tree alone."""


@dataclass
class AttentionCall:
    """`batch` (B) trees padded on the right to `length` (L) tokens each, attended to in one call.

    mask [B, 1, L, L] bool: who attends to whom; None is plain causal, which needs no mask for padding on the right.
    """

    batch: int
    length: int
    mask: torch.Tensor | None


@dataclass
class AttentionPlan:
    """The calls of a micro-batch and where its T tokens lie in their S slots (S >= T, padding counted).

    token_of_slot [S] int64: a padded slot repeats the first token of its tree. slot_of_token [T] int64.
    Both are None where the slots are the tokens, in their order.
    """

    calls: list[AttentionCall]
    token_of_slot: torch.Tensor | None
    slot_of_token: torch.Tensor | None


@dataclass
class TreePackedSeqParams(PackedSeqParams):
    """Megatron's description of packed sequences, with what our core attention and head need of a `MicroBatch`.

    Of the T tokens that this rank has; with context parallelism (`ContextPlan`) that is its share of them.
    rope_cos, rope_sin [T, 1, D / 2] float32. predict_positions [R] int64: tokens whose hidden states go through the
    output layer. Made once per micro-batch and used by every layer.
    """

    plan: AttentionPlan | ContextPlan | None = None
    rope_cos: torch.Tensor | None = None
    rope_sin: torch.Tensor | None = None
    predict_positions: torch.Tensor | None = None


def plan_attention(tree_cu_seqlens: torch.Tensor, branch_ids: torch.Tensor) -> AttentionPlan:
    """Spread the trees bounded by tree_cu_seqlens [G+1] int64 over calls; branch_ids [T] int64 as in `MicroBatch`."""
    lengths = tree_cu_seqlens.diff().tolist()
    branched_before = torch.cat([branch_ids.new_zeros(1), (branch_ids != 0).long().cumsum(0)])[tree_cu_seqlens]
    branched = (branched_before.diff() > 0).tolist()
    calls, token_of_slot, valid_slots = [], [], []
    for masked in (False, True):
        trees = [tree for tree, length in enumerate(lengths) if length and branched[tree] == masked]
        for group in group_by_length([lengths[tree] for tree in trees], masked=masked):
            members = [trees[i] for i in group]
            tokens, valid = _pad_trees(tree_cu_seqlens[:-1][members], tree_cu_seqlens[1:][members])
            mask = _tree_mask(branch_ids[tokens], valid) if masked else None
            calls.append(AttentionCall(*tokens.shape, mask))
            token_of_slot.append(tokens.flatten())
            valid_slots.append(valid.flatten())
    token_of_slot, valid = torch.cat(token_of_slot), torch.cat(valid_slots)
    if torch.equal(token_of_slot, torch.arange(branch_ids.numel(), device=branch_ids.device)):
        return AttentionPlan(calls, None, None)
    slots = torch.nonzero(valid).flatten()
    slot_of_token = torch.empty_like(branch_ids)
    slot_of_token[token_of_slot[slots]] = slots
    return AttentionPlan(calls, token_of_slot, slot_of_token)


def group_by_length(lengths: list[int], *, masked: bool) -> list[list[int]]:
    """Groups of indices into `lengths`, ascending within a group, each within the bounds of a batched call."""
    groups: list[list[int]] = []
    longest = tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padded = (len(groups[-1]) + 1) * longest if groups else 0
        if (
            not groups
            or padded > MAX_PADDING * (tokens + lengths[index])
            or padded > MAX_CALL_TOKENS
            or (masked and padded * longest > MAX_MASK_ENTRIES)
        ):
            groups.append([])
            longest, tokens = lengths[index], 0
        groups[-1].append(index)
        tokens += lengths[index]
    return [sorted(group) for group in groups]


def _pad_trees(starts: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token of each slot [B, L] int64 and which slots are not padding [B, L] bool."""
    offsets = torch.arange(int((ends - starts).max()), device=starts.device)
    valid = offsets < (ends - starts)[:, None]
    return starts[:, None] + torch.where(valid, offsets, 0), valid


def _tree_mask(branches: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[B, 1, L, L] bool from branch ids [B, L]: the earlier tokens, or the token itself, of the trunk or its branch."""
    length = branches.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=branches.device).tril()
    visible = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    # A padded slot repeats the first token and so looks like trunk, but comes after every token of its tree.
    return (causal & visible)[:, None]


class _Pad(torch.autograd.Function):
    """[T, H, D] -> [S, H, D]: tokens into slots."""

    @staticmethod
    def forward(ctx, tokens: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        ctx.plan = plan
        return tokens.index_select(0, plan.token_of_slot)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        # No token attends to a padded slot and no output of one is used, so its gradient is zero.
        return grad.index_select(0, ctx.plan.slot_of_token), None


class _Unpad(torch.autograd.Function):
    """[S, H, D] -> [T, H, D]: slots back to tokens."""

    @staticmethod
    def forward(ctx, slots: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        ctx.plan, ctx.size = plan, slots.shape[0]
        return slots.index_select(0, plan.slot_of_token)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        slots = grad.new_zeros(ctx.size, *grad.shape[1:])
        return slots.index_copy_(0, ctx.plan.slot_of_token, grad), None


class TreeAttention(MegatronModule):
    """Core attention over packed trees, in torch; RoPE is applied here, from the positions of the micro-batch.

    With context parallelism each rank has the queries of its own tokens, and gathers keys and values of all.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, *, pg_collection=None, **_
    ):
        super().__init__(config=config)
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.context_group = None if pg_collection is None else pg_collection.cp

    def forward(
        self, query, key, value, attention_mask=None, *, attn_mask_type=None, attention_bias=None, packed_seq_params
    ):
        """query [T, H, D], key and value [T, G, D], with H a multiple of G -> [T, H * D]."""
        plan = packed_seq_params.plan
        query = apply_rope(query, packed_seq_params.rope_cos, packed_seq_params.rope_sin)
        key = apply_rope(key, packed_seq_params.rope_cos, packed_seq_params.rope_sin)
        attend = self._attend_across_ranks if isinstance(plan, ContextPlan) else self._attend_here
        return attend(plan, query, key, value).flatten(1)

    def _attend_here(self, plan: AttentionPlan, query, key, value) -> torch.Tensor:
        if plan.token_of_slot is not None:
            query, key, value = (_Pad.apply(x, plan) for x in (query, key, value))
        sizes = [call.batch * call.length for call in plan.calls]
        parts = zip(plan.calls, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        output = _join([self._attend(call, *part, mask=call.mask) for call, *part in parts])
        return output if plan.slot_of_token is None else _Unpad.apply(output, plan)

    def _attend_across_ranks(self, plan: ContextPlan, query, key, value) -> torch.Tensor:
        key, value = gather_tokens(torch.stack([key, value], 1), self.context_group)[plan.key_index].unbind(1)
        queries = query[plan.query_index].split([call.batch * call.queries for call in plan.calls])
        sizes = [call.batch * call.keys for call in plan.calls]
        parts = zip(plan.calls, queries, key.split(sizes), value.split(sizes), strict=True)
        outputs = [self._attend(call, *part, mask=_context_mask(call)) for call, *part in parts]
        return _join(outputs)[plan.query_order]

    def _attend(self, call: AttentionCall | ContextCall, *query_key_value: torch.Tensor, mask) -> torch.Tensor:
        """[B * L, heads, D] each -> [B * L, H, D]."""
        query, key, value = (x.unflatten(0, (call.batch, -1)).transpose(1, 2) for x in query_key_value)
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2).flatten(0, 1)


def _context_mask(call: ContextCall):
    if call.mask is not None or call.queries == call.keys:
        return call.mask
    return causal_lower_right(call.queries, call.keys)  # the last query is the last key


def _join(outputs: list[torch.Tensor]) -> torch.Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
