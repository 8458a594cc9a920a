"""Whether a group says which of its responses are better."""

import torch


def rewards_differ(rewards: torch.Tensor) -> bool:
    """rewards [M] float, those of one group -> whether two finite ones are not equal (DAPO, arXiv 2503.14476, 3.2).

    Compared exactly, in the dtype given, as the advantages are that follow: only equal rewards are equal to their mean.
    A reward that is not finite is no verdict and is not compared.
    """
    finite = rewards[rewards.isfinite()]
    return bool((finite != finite[:1]).any())
