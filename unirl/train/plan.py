"""Which trees share a micro-batch and which rank runs it: arithmetic on sizes and costs, without a tensor."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

EVEN_ENOUGH = 1.002
"""The dearest rank's work, of the mean rank's: below it no better partition is looked for."""
MAX_EXCHANGES = 8
"""Exchanges for each rank, at most."""


@dataclass(frozen=True)
class ParallelShape:
    """What the parallel layout of a model asks of a plan; the defaults are one process's.

    dp: data-parallel ranks, which share the micro-batches of a step.
    tree_multiple: the tokens of every tree, padding counted, are a multiple of it.
    total_multiple: so are the tokens of every micro-batch.
    count_multiple: so is the number of micro-batches of every rank.
    """

    dp: int = 1
    tree_multiple: int = 1
    total_multiple: int = 1
    count_multiple: int = 1

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"ParallelShape.{name}: found {value}, expected 1 or more")

    @staticmethod
    def of_layout(
        *, dp: int = 1, tp: int = 1, pp: int = 1, vpp: int = 1, cp: int = 1, sequence_parallel: bool = False
    ) -> "ParallelShape":
        """Of the sizes of `parallel.*`: CP deals each tree out in 2 * cp chunks, sequence parallelism cuts the tokens
        of a CP rank in tp pieces, and the interleaved pipeline schedule runs micro-batches in rounds of pp.
        """
        return ParallelShape(
            dp=dp,
            tree_multiple=2 * cp if cp > 1 else 1,
            total_multiple=cp * tp if sequence_parallel else 1,
            count_multiple=pp if vpp > 1 else 1,
        )

    @property
    def token_multiple(self) -> int:
        """What the tokens of a micro-batch are a multiple of, its trees being multiples of theirs."""
        return math.lcm(self.tree_multiple, self.total_multiple)


@dataclass(frozen=True)
class CostModel:
    """Work of a tree of L tokens that predicts R response tokens: linear * L + quadratic * L^2 + response * R.

    The unit is any: only the ratios count. The default calls all tokens equally dear.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    response: float = 0.0

    @staticmethod
    def of_transformer(
        *,
        num_layers: int,
        hidden_size: int,
        ffn_hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
    ) -> "CostModel":
        """FLOPs of a forward pass, two for each multiply-add; the backward pass costs twice that, whatever the tree.

        Per token and layer the products of the four attention projections and of the three of SwiGLU; per pair of
        tokens, of which causal attention has L^2 / 2, one product each for scores and values in every head; per
        response token the vocabulary head. `ffn_hidden_size` is what one token passes through: of a mixture of
        experts, all the experts that are picked for it.
        """
        attention = 2 * hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
        feed_forward = 2 * 3 * hidden_size * ffn_hidden_size
        return CostModel(
            linear=float(num_layers * (attention + feed_forward)),
            quadratic=float(num_layers * 2 * num_heads * head_dim),
            response=float(2 * hidden_size * vocab_size),
        )

    def work(self, tokens: int, responses: int) -> float:
        """Of one tree: tokens L, padding counted, and responses R."""
        return self.linear * tokens + self.quadratic * tokens * tokens + self.response * responses


def deal_trees(
    sizes: Sequence[int], costs: Sequence[float], *, capacity: int, dp: int = 1, count_multiple: int = 1
) -> list[list[int]]:
    """dp * k micro-batches as lists of indices into `sizes` (tokens of each tree), rank after rank, k each.

    The trees are first spread over the ranks so that their costs are even, which is what decides when the step ends;
    then each rank's are packed into as few micro-batches of `capacity` tokens as first-fit-decreasing finds. Ranks
    with fewer than k get empty lists at the end; k is a multiple of `count_multiple`, and 0 where there are no trees.
    """
    ranks = [
        [[trees[i] for i in members] for members in first_fit_decreasing([sizes[tree] for tree in trees], capacity)]
        for trees in balanced_partition(costs, dp)
    ]
    count = round_up(max(map(len, ranks)), count_multiple)
    return [members for rank in ranks for members in rank + [[] for _ in range(count - len(rank))]]


def balanced_partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """`parts` lists of indices into `costs`, ascending, with sums as even as they get.

    First by the longest-processing-time rule: the dearest that is left goes to the part that is cheapest (Graham 1969;
    at most 4/3 of the best maximum). Many small items make that nearly perfect; a few large ones are then exchanged
    between the dearest part and others.
    """
    heap = [(0.0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    for index in _decreasing(costs):
        load, part = heap[0]
        members[part].append(index)
        heapq.heapreplace(heap, (load + costs[index], part))
    _exchange(members, costs)
    return [sorted(part) for part in members]


def _exchange(members: list[list[int]], costs: Sequence[float]) -> None:
    """Lower the dearest part, again and again, while it is above EVEN_ENOUGH of the mean."""
    loads = [sum(costs[index] for index in part) for part in members]
    enough = EVEN_ENOUGH * sum(loads) / len(loads)
    for _ in range(MAX_EXCHANGES * len(loads)):
        high = max(range(len(loads)), key=loads.__getitem__)
        found = _find_exchange(members, loads, costs, high) if loads[high] > enough else None
        if found is None:
            return
        low, given, taken = found
        _move(given, high, low, members, loads, costs)
        if taken is not None:
            _move(taken, low, high, members, loads, costs)


def _find_exchange(
    members: list[list[int]], loads: list[float], costs: Sequence[float], high: int
) -> tuple[int, int, int | None] | None:
    """(part, item of part `high` that goes to it, item that comes back or None) that makes part `high` cheaper and the
    other one not as dear as it was: with the cheapest part that has one, the best one there. None where there is none.
    """
    for low in sorted(range(len(loads)), key=loads.__getitem__):
        best, found = loads[high] * (1 - 1e-9), None  # what rounding alone gains is no gain
        for given in members[high] if low != high else []:
            for taken in [None, *members[low]]:
                moved = costs[given] - (0 if taken is None else costs[taken])
                dearer = max(loads[high] - moved, loads[low] + moved)
                if dearer < best:
                    best, found = dearer, (low, given, taken)
        if found is not None:
            return found
    return None


def _move(
    item: int, source: int, to: int, members: list[list[int]], loads: list[float], costs: Sequence[float]
) -> None:
    members[source].remove(item)
    members[to].append(item)
    loads[source] -= costs[item]
    loads[to] += costs[item]


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices into `sizes`, the sum of each bin at most `capacity`; indices ascend within a bin.

    Raises ValueError where a size alone exceeds the capacity.
    """
    if not sizes:
        return []
    if max(sizes) > capacity:
        raise ValueError(f"first_fit_decreasing: found a size of {max(sizes)}, more than the capacity {capacity}")
    # A binary tree over the bins, as an array: the children of node n are 2n and 2n + 1, room[n] is the largest room
    # below it. Unused bins are empty, and so the leftmost with room enough is always an open bin or the next new one.
    leaves = 1 << (len(sizes) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = [[] for _ in range(leaves)]
    for index in _decreasing(sizes):
        size, node = sizes[index], 1
        while node < leaves:
            node *= 2
            node += room[node] < size
        bins[node - leaves].append(index)
        room[node] -= size
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            room[node] = left if left > right else right
    return [sorted(members) for members in bins if members]


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def _decreasing(values: Sequence[float]) -> list[int]:
    """Indices from the largest value to the smallest, equal ones in their order."""
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)
