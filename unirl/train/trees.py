"""The trees of a plan: which samples share one pass over their prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

from unirl.train.plan import CostModel, ParallelShape, balanced_partition, round_up
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
        self.prompt = text.prompt_lengths.tolist()
        self.generated = text.response_lengths.tolist()

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


def choose_trees(
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
