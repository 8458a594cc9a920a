"""Scorers of the tests, named by dotted path as a user's own would be."""

from zlib import crc32


class CountLetters:
    """The share of ASCII letters in a response: a reward that varies between samples of a random policy."""

    def score(self, responses: list[str], answers: list[str]) -> list[float]:
        return [sum(c.isascii() and c.isalpha() for c in response) / 12 for response in responses]


class AlwaysEqual:
    def score(self, responses: list[str], answers: list[str]) -> list[float]:
        return [0.5] * len(responses)


class AlwaysRaises:
    def score(self, responses: list[str], answers: list[str]) -> list[float]:
        raise RuntimeError("no verdict ever")


class SometimesRaises:
    """No verdict on responses of odd length."""

    def score(self, responses: list[str], answers: list[str]) -> list[float]:
        if any(len(response) % 2 for response in responses):
            raise RuntimeError("no verdict")
        return [float(len(response)) for response in responses]


class VariesOnZero:
    """A reward of its own for each response to the prompt whose answer is 0, the same for all other responses."""

    def score(self, responses: list[str], answers: list[str]) -> list[float]:
        return [crc32(r.encode()) / 2**32 if a == "0" else 0.5 for r, a in zip(responses, answers, strict=True)]
