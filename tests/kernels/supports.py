"""Supports to test with, and the oracle: the whole row's with -inf outside of the support."""

import torch
from torch import Tensor

from tests.kernels.dense import Dense, dense


def make_support(targets: Tensor, vocab: int, size: int, seed: int = 0) -> Tensor:
    """[T, size] int32: each row of 1 to `size` distinct tokens, the target among them, in any order between -1s."""
    generator = torch.Generator().manual_seed(seed)
    support = torch.full((len(targets), size), -1, dtype=torch.int32)
    for row, target in enumerate(targets.tolist()):
        others = torch.randperm(vocab, generator=generator)
        count = int(torch.randint(size, (1,), generator=generator))
        chosen = torch.cat([torch.tensor([target]), others[others != target][:count]])
        support[row, torch.randperm(size, generator=generator)[: len(chosen)]] = chosen.int()
    return support


def dense_support(
    logits: Tensor, targets: Tensor, support: Tensor, vocab: int, temperature: float, grads: Tensor
) -> Dense:
    """`dense` of the restricted rows; every row has a token."""
    outside = torch.ones(logits.shape, dtype=torch.bool)
    rows, slots = (support >= 0).nonzero(as_tuple=True)
    outside[rows, support[rows, slots].long()] = False
    return dense(logits.double().masked_fill(outside, -torch.inf), targets, vocab, temperature, grads)
