"""What an environment of multi-turn episodes is, and how its name becomes a class."""

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from unirl.errors import UserError

BUILT_IN = {"calculator": "unirl.rollout.environments.calculator.Calculator"}

Message = Mapping[str, str]
"""A chat message: {role, content}."""


@dataclass(frozen=True)
class StepResult:
    """What comes of one response.

    reward: of this turn; an episode's reward is the sum over its turns, NaN gives it no verdict. done: the episode ends
    here. observation: messages that are put before the next response, at least one where the episode goes on; not read
    when `done`.
    """

    reward: float
    done: bool
    observation: Sequence[Message] = field(default=())


class Environment(Protocol):
    """One episode: made with `rollout.environment_args`, reset once, then stepped until it is done or stopped.

    It runs in the trainer's process, one call at a time. Any exception aborts its episode, which is counted, reported
    and left out of training; a `UserError` ends the run.
    """

    def reset(self, record: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """Begin the episode of a prompt record. Returns messages to put between the prompt and the first response,
        usually none. Whatever is random comes from `seed` (differs for each sample), so that a resumed run repeats it.
        """

    def step(self, response: str) -> StepResult:
        """Take the policy's next response: its text without special tokens."""


EnvironmentFactory = Callable[[], Environment]


def load_environment(name: str, args: Mapping[str, Any]) -> EnvironmentFactory:
    """Makes the environment that `rollout.environment` names (built-in name or dotted path of a class), with `args`.

    One is made right away, so that wrong arguments are found before anything runs. Raises UserError where that fails.
    """
    where = f"rollout.environment={name}"
    module_name, _, class_name = BUILT_IN.get(name, name).rpartition(".")
    if not module_name:
        raise UserError(
            f"{where}: found no such environment, expected one of {', '.join(BUILT_IN)} or the dotted path of a class"
        )
    try:
        found = getattr(import_module(module_name), class_name, None)
    except ImportError as error:
        raise UserError(f"{where}: cannot import {module_name}: {error}") from error
    if not inspect.isclass(found):
        raise UserError(f"{where}: expected a class {class_name} in {module_name}, found {type(found).__name__}")
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if missing:
        raise UserError(f"{where}: the class has no method {' and no '.join(missing)}; see unirl.rollout.environment")
    try:
        found(**args)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: cannot be made with rollout.environment_args={dict(args)}: {error}") from error
    return partial(found, **args)


def check_messages(messages: Any) -> list[dict[str, str]]:
    """`messages` as a list. Raises TypeError unless each is {role, content} with text."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"expected a list of chat messages, found {type(messages).__name__}")
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise TypeError(f"expected chat messages {{role, content}} with text, found {message!r:.80}")
    return [dict(message) for message in messages]


def check_step(result: Any) -> StepResult:
    """`result` itself. Raises TypeError or ValueError unless it is a StepResult that can be used."""
    if not isinstance(result, StepResult):
        raise TypeError(f"step: expected a StepResult, found {type(result).__name__}")
    if not isinstance(result.reward, numbers.Real):
        raise TypeError(f"StepResult.reward: expected a number, found {type(result.reward).__name__}")
    if not result.done and not check_messages(result.observation):
        raise ValueError("StepResult.observation: expected at least one message where the episode is not done")
    return result
