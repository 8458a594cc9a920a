"""From a `Part` to micro-batches: packed tokens, who attends to whom, and which token is predicted where."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from unirl.config.schema import StackConfig
from unirl.train.plan import CostModel, ParallelShape, round_up
from unirl.train.trees import SampleTable, Tree, plan_trees
from unirl.types import Part
from unirl.types.part import TOKEN_ESTIMATES


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples for one forward and backward pass: T tokens, G trees, N samples, R response tokens.

    A *tree* is a prompt followed by one or more responses to it (*branches*), and by padding where its length has to
    be a multiple of something. A token attends to the earlier tokens of its tree that belong to the prompt or to its
    own branch. Without prompt sharing a tree is one sample and attention within it is plainly causal. Trees never see
    each other. Padding repeats the first token of its tree and counts as prompt, but comes after every other token of
    the tree: nothing attends to it but padding.

    An *empty* micro-batch keeps a rank in step with those that have one more: a single dummy tree, N = R = 0.

    tokens [T] int64, position_ids [T] int64 (each branch goes on where the prompt ends, padding where the last branch
        ends).
    branch_ids [T] int64: 0 on the tokens that every branch sees and on padding, 1.. on those of a branch.
    tree_cu_seqlens [G+1] int64: bounds of the trees in `tokens`, padding included.
    tree_lengths [G] int64: tokens of each tree without its padding; a dummy tree has 1.
    predict_positions [R] int64: position in `tokens` whose hidden state predicts the response token.
    targets [R] int64: the response tokens, sample after sample.
    loss_cu_seqlens [N+1] int64: bounds of the samples in the R response tokens.
    old_logp [R] float32: rollout log-probs.
    loss_mask [R] bool: False on a response token that is left out (a value that is not finite).
    sample_positions [N] int64: position of each sample in the Part.
    token_positions [R] int64: position of each response token in the Part's tokens.
    advantages, prox_logp, ref_logp, values, returns [R] float32, or None where the Part has none.
    support [R, K] int32: the tokens that each was drawn from, as in `TextSegment`; None where the Part has none.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    branch_ids: torch.Tensor
    tree_cu_seqlens: torch.Tensor
    tree_lengths: torch.Tensor
    predict_positions: torch.Tensor
    targets: torch.Tensor
    loss_cu_seqlens: torch.Tensor
    old_logp: torch.Tensor
    loss_mask: torch.Tensor
    sample_positions: torch.Tensor
    token_positions: torch.Tensor
    advantages: torch.Tensor | None = None
    prox_logp: torch.Tensor | None = None
    ref_logp: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    support: torch.Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self.sample_positions.numel() == 0


class PlannedModel(Protocol):
    """A model as far as a plan for it goes: its parallel layout, and what its work costs."""

    shape: ParallelShape
    cost: CostModel


def plan_for(model: PlannedModel, part: Part, samples: torch.Tensor, config: StackConfig) -> list[MicroBatch]:
    """`plan_micro_batches` by the keys of `stack` for the layout of `model`."""
    return plan_micro_batches(
        part,
        samples,
        token_budget=config.micro_batch_tokens,
        share_prompts=config.share_prompts,
        cost=model.cost,
        **asdict(model.shape),
    )


def plan_micro_batches(
    part: Part,
    samples: torch.Tensor,
    *,
    token_budget: int,
    share_prompts: bool = False,
    dp: int = 1,
    tree_multiple: int = 1,
    total_multiple: int = 1,
    count_multiple: int = 1,
    cost: CostModel | None = None,
) -> list[MicroBatch]:
    """Pack the samples at the positions `samples` [M] int64 into micro-batches of at most `token_budget` tokens.

    Prompt tokens, response tokens and padding count; with `share_prompts` the prompt of a group counts once for each
    tree. Samples without a response token are left out, and a sample is never divided. `dp` and the multiples are
    those of `ParallelShape`. The plan depends on nothing but its arguments.

    Returns dp * k micro-batches, rank after rank: those of data-parallel rank r are [r * k : (r + 1) * k], the last of
    them empty where its work fills fewer than k. The ranks' work is even by `cost` (None: each token counts the same).
    Where no sample has a response token there are none at all.

    Raises ValueError when one sample alone exceeds the budget, or has no token before its response (it names the
    sample).
    """
    shape = ParallelShape(dp, tree_multiple, total_multiple, count_multiple)
    table = SampleTable(part.text)
    plan = plan_trees(
        table,
        samples.tolist(),
        token_budget=token_budget,
        share_prompts=share_prompts,
        shape=shape,
        cost=cost or CostModel(),
    )
    packer = _Packer(part, table, shape.token_multiple)
    return [packer.pack(trees) for trees in plan]


def join_plans(plans: Sequence[list[MicroBatch]], dp: int) -> list[MicroBatch]:
    """Several plans for `dp` ranks as one, in which each rank runs its micro-batches of all of them, in their order."""
    counts = [len(plan) // dp for plan in plans]
    return [
        batch
        for rank in range(dp)
        for plan, count in zip(plans, counts, strict=True)
        for batch in plan[rank * count : (rank + 1) * count]
    ]


class _Packer:
    """Makes the tensors of micro-batches from the trees of a part."""

    def __init__(self, part: Part, table: SampleTable, token_multiple: int):
        self.text = part.text
        self.table = table
        self.token_multiple = token_multiple
        self.estimates = {name: getattr(part, name) for name in TOKEN_ESTIMATES if getattr(part, name) is not None}

    def pack(self, trees: list[Tree]) -> MicroBatch:
        """The micro-batch of the trees; of none, an empty one."""
        spans, bounds = self._spans(trees)
        # Every token by the span that it belongs to and its place within it.
        span_of = torch.repeat_interleave(torch.arange(len(spans.length)), spans.length)
        within = torch.arange(span_of.numel()) - (spans.length.cumsum(0) - spans.length)[span_of]
        source = spans.source[span_of] + spans.stride[span_of] * within
        predicted = torch.nonzero((spans.predictor >= 0)[span_of] & self.text.loss_mask[source]).flatten()
        loss_tokens = source[predicted]
        samples = torch.tensor([sample for tree in trees for sample in tree.samples], dtype=torch.int64)
        counts = torch.tensor([0, *(self.table.generated[sample] for tree in trees for sample in tree.samples)])
        estimates = {name: value[loss_tokens] for name, value in self.estimates.items()}
        old_logp = self.text.log_probs[loss_tokens]
        return MicroBatch(
            tokens=self.text.tokens[source],
            position_ids=spans.position[span_of] + within,
            branch_ids=spans.branch[span_of],
            tree_cu_seqlens=torch.tensor(bounds),
            tree_lengths=torch.tensor([tree.tokens for tree in trees] or [1]),
            predict_positions=_predicting_positions(predicted, within[predicted], spans.predictor[span_of[predicted]]),
            targets=self.text.tokens[loss_tokens],
            loss_cu_seqlens=counts.cumsum(0),
            old_logp=old_logp,
            loss_mask=torch.isfinite(torch.stack([old_logp, *estimates.values()])).all(0),
            sample_positions=samples,
            token_positions=loss_tokens,
            support=None if self.text.support is None else self.text.support[loss_tokens],
            **estimates,
        )

    def _spans(self, trees: list[Tree]) -> tuple["_Spans", list[int]]:
        """The spans of a micro-batch, in their order, and the bounds of its trees."""
        table, rows, bounds, end = self.table, [], [0], 0
        for tree in trees:
            first = tree.samples[0]
            start, prompt = table.start[first], table.prompt[first]
            rows.append((start, 1, 0, prompt, 0, -1))
            for branch, sample in enumerate(tree.samples, start=1):
                # A tree of one sample is plain causal text: every token is on the trunk.
                branch = branch if len(tree.samples) > 1 else 0
                response = table.length[sample] - prompt
                rows.append((table.start[sample] + prompt, 1, prompt, response, branch, end + prompt - 1))
            end += tree.padded_tokens
            rows.append((start, 0, table.length[tree.samples[-1]], tree.padded_tokens - tree.tokens, 0, -1))
            bounds.append(end)
        if not trees:
            rows = [(0, 1, 0, 1, 0, -1), (0, 0, 1, 0, 0, -1)]
            bounds.append(end := 1)
        # The last tree is padded on until the micro-batch has the length it needs.
        missing = round_up(end, self.token_multiple) - end
        bounds[-1] += missing
        spans = _Spans(*torch.tensor(rows).unbind(1))
        spans.length[-1] += missing
        return spans, bounds


@dataclass(frozen=True)
class _Spans:
    """Runs of tokens of a micro-batch: prompts, responses and paddings. All [S] int64.

    source: position in the Part's tokens of the first token. stride: to the source of the next one, 0 for padding.
    position: position id of the first token. length: tokens. branch: their branch.
    predictor: position in the micro-batch of the token before the first one, -1 where nothing is to be predicted.
    """

    source: torch.Tensor
    stride: torch.Tensor
    position: torch.Tensor
    length: torch.Tensor
    branch: torch.Tensor
    predictor: torch.Tensor


def _predicting_positions(predicted: torch.Tensor, within: torch.Tensor, predictor: torch.Tensor) -> torch.Tensor:
    """The one shift by one between logits and tokens: a token is predicted by the hidden state of the token before it,
    which for the first token of a branch lies at the end of the shared prompt.

    predicted [R]: positions in the micro-batch; within [R]: places in the branch; predictor [R]: ends of the prompts.
    """
    return torch.where(within == 0, predictor, predicted - 1)
