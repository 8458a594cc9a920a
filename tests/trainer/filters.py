"""Group filters of the tests, named by dotted path as a user's own would be."""

from unirl.types import Part

NO_FILTER = 5


def even_answer(group: Part) -> bool:
    return int(group.records[0]["answer"]) % 2 == 0


def mean_above_a_half(group: Part):
    """Answers with a tensor of one."""
    return group.rewards.mean() > 0.5


def forgets_to_answer(group: Part):
    group.rewards.mean()
