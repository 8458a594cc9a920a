"""How a rule between keys is declared."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from unirl.config.problem import Problem
from unirl.config.schema import TrainConfig

Check = Callable[[TrainConfig], str | None]


@dataclass(frozen=True)
class Rule:
    """A check of a config: `check` returns what is wrong, or None, and its docstring is the rule in words.

    `keys` are the dotted paths that it reads; what is wrong is reported under the first. `run_only`: the rule says what
    this version or this machine cannot run; the config itself may be sound and is still planned by --dry-run.
    """

    keys: tuple[str, ...]
    check: Check
    run_only: bool

    @property
    def text(self) -> str:
        """The rule in words, on one line."""
        return " ".join((self.check.__doc__ or "").split())

    def reads(self, path: str) -> bool:
        """Whether `path` is one of the keys that the rule reads, or lies around or within one."""
        return any(f"{key}.".startswith(f"{path}.") or f"{path}.".startswith(f"{key}.") for key in self.keys)

    def problem(self, config: TrainConfig) -> Problem | None:
        """What is wrong, under the first key."""
        message = self.check(config)
        return Problem(self.keys[0], message) if message else None


def rule(*keys: str, run_only: bool = False) -> Callable[[Check], Rule]:
    """Make a `Rule` of the decorated function."""
    return lambda check: Rule(keys, check, run_only)


def rules_of(module: ModuleType) -> list[Rule]:
    """The rules that a module declares, in its order."""
    return [member for member in vars(module).values() if isinstance(member, Rule)]
