"""Environments of the tests, named by dotted path as a user's own would be."""

from unirl.rollout.environment import StepResult


class Counter:
    """Deterministic: says how many letters the response had, pays a tenth of them, ends after `turns` responses."""

    def __init__(self, turns: int = 3, opening: str | None = None):
        self.turns, self.opening, self.seen = turns, opening, []

    def reset(self, record, seed):
        self.seen = []
        return [{"role": "user", "content": self.opening}] if self.opening else []

    def step(self, response):
        self.seen.append(response)
        letters = sum(c.isascii() and c.isalpha() for c in response)
        observation = [{"role": "user", "content": f"{letters} letters"}]
        return StepResult(reward=letters / 10, done=len(self.seen) == self.turns, observation=observation)


class Fragile(Counter):
    """Breaks on a response whose length `fails_on` divides."""

    def __init__(self, fails_on: int, turns: int = 3):
        super().__init__(turns)
        self.fails_on = fails_on

    def step(self, response):
        if len(response) % self.fails_on == 0:
            raise RuntimeError("bad length")
        return super().step(response)


class RaisesAtReset(Counter):
    def reset(self, record, seed):
        raise KeyError("no such field")


class SaysNothing(Counter):
    """Goes on without an observation, which leaves nothing to answer."""

    def step(self, response):
        return StepResult(reward=0.0, done=False)
