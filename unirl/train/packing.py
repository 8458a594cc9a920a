"""From a `Part` to micro-batches: packed tokens, who attends to whom, and which token is predicted where."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples for one forward and backward pass: T tokens, G trees, N samples, R response tokens.

    A *tree* is a prompt followed by one or more responses to it (*branches*). A token attends to the earlier tokens of
    its tree that belong to the prompt or to its own branch. Without prompt sharing a tree is one sample and attention
    within it is plainly causal. Trees never see each other.

    tokens [T] int64, position_ids [T] int64 (each branch goes on where the prompt ends).
    branch_ids [T] int64: 0 on the tokens that every branch sees, 1.. on those of a branch.
    tree_cu_seqlens [G+1] int64: bounds of the trees in `tokens`.
    predict_positions [R] int64: position in `tokens` whose hidden state predicts the response token.
    targets [R] int64: the response tokens, sample after sample.
    loss_cu_seqlens [N+1] int64: bounds of the samples in the R response tokens.
    old_logp [R] float32: rollout log-probs. advantages [R] float32.
    loss_mask [R] bool: False on a response token that is left out (a value that is not finite).
    sample_positions [N] int64: position of each sample in the Part.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    branch_ids: torch.Tensor
    tree_cu_seqlens: torch.Tensor
    predict_positions: torch.Tensor
    targets: torch.Tensor
    loss_cu_seqlens: torch.Tensor
    old_logp: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    sample_positions: torch.Tensor
