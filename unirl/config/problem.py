"""What can be wrong with a key."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """What is wrong with the key at a dotted path."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"
