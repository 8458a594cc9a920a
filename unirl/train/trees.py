"""Samples to trees, which share one pass over a prompt, and trees to micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unirl.train.plan import CostModel, ParallelShape, balanced_partition, deal_trees, round_up
from unirl.types import TextSegment


@dataclass(frozen=True)
class Tree:
    """Samples with one prompt: their positions, the tokens in all, those among them that are predicted, and the tokens
    with padding.
    """

    samples: list[int]
    tokens: int
    responses: int
    padded_tokens: int

    def work(self, cost: CostModel) -> float:
        return cost.work(self.padded_tokens, self.responses)


class SampleTable:
    """Where each sample's prompt and response lie in a TextSegment, as Python ints: lists over all N samples.

    start, length, prompt: first token, tokens, and tokens before the first generated one. generated: tokens to predict.
    """

    def __init__(self, text: TextSegment):
        self.text = text
        self.start = text.cu_seqlens[:-1].tolist()
        self.length = text.lengths.tolist()
        # By sample: with millions of tokens, tensors of them would take longer than the planning.
        mask = text.loss_mask.numpy()
        masks = [mask[start : start + length] for start, length in zip(self.start, self.length, strict=True)]
        self.generated = [int(np.count_nonzero(of_sample)) for of_sample in masks]
        self.prompt = [
            int(of_sample.argmax()) if generated else len(of_sample)
            for of_sample, generated in zip(masks, self.generated, strict=True)
        ]

    def tree(self, samples: list[int], multiple: int) -> Tree:
        """Of the samples of one prompt, padded to a multiple of `multiple` tokens."""
        prompt = self.prompt[samples[0]]
        tokens = prompt + sum(self.length[sample] - prompt for sample in samples)
        return Tree(samples, tokens, sum(self.generated[sample] for sample in samples), round_up(tokens, multiple))

    def prompt_keys(self, samples: Sequence[int]) -> list[tuple[int, bytes]]:
        """Equal where two samples are of one group and have the same prompt."""
        tokens, groups = self.text.tokens.numpy(), self.text.group_ids.tolist()
        return [
            (groups[sample], tokens[self.start[sample] : self.start[sample] + self.prompt[sample]].tobytes())
            for sample in samples
        ]


def plan_trees(
    table: SampleTable,
    samples: Sequence[int],
    *,
    token_budget: int,
    share_prompts: bool,
    shape: ParallelShape,
    cost: CostModel,
) -> list[list[Tree]]:
    """The trees of each micro-batch, as `plan_micro_batches` says; nothing but the plan, of which it makes tensors."""
    samples = [sample for sample in samples if table.generated[sample]]
    # A micro-batch that is full up to this is still within the budget when it is padded.
    capacity = token_budget // shape.token_multiple * shape.token_multiple
    _check_samples(table, samples, shape, token_budget, capacity)
    trees = _choose_trees(table, samples, capacity=capacity, shape=shape, cost=cost, share_prompts=share_prompts)
    dealt = deal_trees(
        [tree.padded_tokens for tree in trees],
        [tree.work(cost) for tree in trees],
        capacity=capacity,
        dp=shape.dp,
        count_multiple=shape.count_multiple,
    )
    return [[trees[i] for i in members] for members in dealt]


def _check_samples(
    table: SampleTable, samples: list[int], shape: ParallelShape, token_budget: int, capacity: int
) -> None:
    for sample in samples:
        if table.prompt[sample] == 0:
            raise ValueError(
                f"sample {int(table.text.sample_ids[sample])} has no token before its response: there is nothing to "
                "predict its first one from"
            )
        if table.length[sample] > capacity:
            multiple = shape.token_multiple
            padded = f" (micro-batches are padded to a multiple of {multiple})" if multiple > 1 else ""
            raise ValueError(
                f"sample {int(table.text.sample_ids[sample])} has {table.length[sample]} tokens, more than the budget "
                f"of a micro-batch, {token_budget}{padded}: raise stack.micro_batch_tokens"
            )


def _choose_trees(
    table: SampleTable,
    samples: Sequence[int],
    *,
    capacity: int,
    shape: ParallelShape,
    cost: CostModel,
    share_prompts: bool,
) -> list[Tree]:
    """The samples as trees of at most `capacity` tokens, padding counted.

    With `share_prompts` a tree takes all samples of a prompt that fit. Large trees are hard to spread evenly over
    data-parallel ranks, and so with several of them smaller ones are tried, too, each half as many branches, down to
    one: the first whose dearest rank is cheapest is chosen, the repeated prompts counted.
    """
    multiple = shape.tree_multiple
    if not share_prompts:
        return [table.tree([sample], multiple) for sample in samples]
    keys = table.prompt_keys(samples)
    chosen = _shared_trees(table, samples, keys, capacity, multiple, max_branches=len(samples))
    branches = max((len(tree.samples) for tree in chosen), default=1)
    dearest = _dearest_rank(chosen, cost, shape.dp)
    while shape.dp > 1 and branches > 1:
        branches = (branches + 1) // 2
        trees = _shared_trees(table, samples, keys, capacity, multiple, max_branches=branches)
        if _dearest_rank(trees, cost, shape.dp) < dearest:
            chosen, dearest = trees, _dearest_rank(trees, cost, shape.dp)
    return chosen


def _shared_trees(
    table: SampleTable, samples: Sequence[int], keys: list, capacity: int, multiple: int, *, max_branches: int
) -> list[Tree]:
    """A sample joins the last tree of its prompt, or opens another one where that has no room."""
    open_trees: dict[tuple[int, bytes], list[int]] = {}
    tokens: dict[tuple[int, bytes], int] = {}
    trees: list[list[int]] = []
    for sample, key in zip(samples, keys, strict=True):
        response = table.length[sample] - table.prompt[sample]
        tree = open_trees.get(key)
        if tree is not None and len(tree) < max_branches and round_up(tokens[key] + response, multiple) <= capacity:
            tree.append(sample)
            tokens[key] += response
        else:
            open_trees[key] = tree = [sample]
            tokens[key] = table.length[sample]
            trees.append(tree)
    return [table.tree(tree, multiple) for tree in trees]


def _dearest_rank(trees: list[Tree], cost: CostModel, dp: int) -> float:
    works = [tree.work(cost) for tree in trees]
    return max(sum(works[i] for i in members) for members in balanced_partition(works, dp))
