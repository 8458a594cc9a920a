"""Scorers of the tests, named by dotted path as a user's own would be."""


class CountLetters:
    """The share of ASCII letters in a response: a reward that varies between samples of a random policy."""

    def score(self, responses: list[str], answers: list[str]) -> list[float]:
        return [sum(c.isascii() and c.isalpha() for c in response) / 12 for response in responses]


class AlwaysEqual:
    def score(self, responses: list[str], answers: list[str]) -> list[float]:
        return [0.5] * len(responses)


class SometimesRaises:
    """No verdict on responses of odd length."""

    def score(self, responses: list[str], answers: list[str]) -> list[float]:
        if any(len(response) % 2 for response in responses):
            raise RuntimeError("no verdict")
        return [float(len(response)) for response in responses]
