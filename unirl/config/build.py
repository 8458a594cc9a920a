"""From a composed, untyped config to `TrainConfig`: types, single-key rules and unknown keys, all problems at once."""

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, InterpolationToMissingValueError, OmegaConfBaseException

from unirl.config.catalog import (
    MANDATORY,
    default_of,
    describe_rules,
    describe_type,
    nearest,
    nearest_keys,
    section_class,
    to_yaml_text,
    union_options,
)
from unirl.config.problem import Problem
from unirl.config.schema import TrainConfig


@dataclass
class Findings:
    """What is wrong, and the dotted paths of keys without a usable value: more than the problems name, since a key that
    takes its value from one with a problem is not reported again.
    """

    problems: list[Problem] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(self, path: str, message: str) -> None:
        """Report a problem of a key, unless the same one is already reported: one unset variable, one line."""
        self.broken.append(path)
        is_known = message.startswith(_UNSET) and any(problem.message == message for problem in self.problems)
        if not is_known:
            self.problems.append(Problem(path, message))


_UNSET = "environment variable"


def build(composed: DictConfig) -> tuple[TrainConfig, Findings]:
    """The typed config, and what is wrong with it; a key without a usable value holds None."""
    findings = Findings()
    return _build_section(TrainConfig, composed, "", findings), findings


def _build_section(schema: type, node: DictConfig, prefix: str, findings: Findings) -> Any:
    hints = get_type_hints(schema)
    values = {}
    for item in fields(schema):
        path = f"{prefix}{item.name}"
        try:
            values[item.name] = _read_key(node, item, hints[item.name], path, findings)
        except InterpolationToMissingValueError:
            values[item.name] = None  # the key that is missing is reported under its own name
            findings.broken.append(path)
        except ValueError as error:
            values[item.name] = None
            findings.add(path, str(error))
    for name in node:
        if name not in values:
            findings.problems += _unknown_keys(node, name, f"{prefix}{name}")
    return schema(**values)


def _read_key(node: DictConfig, item: Field, hint: Any, path: str, findings: Findings) -> Any:
    """Raises ValueError with what was found and expected."""
    if item.name not in node and default_of(item) != MANDATORY:
        return default_of(item)
    if item.name not in node or OmegaConf.is_missing(node, item.name):
        raise ValueError(f"is not set and has no default: give {path}=... or set it in the recipe")
    value = _resolve(node, item.name)
    section = section_class(hint)
    if section and isinstance(value, DictConfig):
        return _build_section(section, value, f"{path}.", findings)
    if isinstance(value, DictConfig | ListConfig):
        value = _to_plain(value)
    value = convert(value, hint)
    _check_rules(value, item.metadata)
    return value


def _resolve(node: DictConfig, name: str) -> Any:
    try:
        return node[name]
    except InterpolationToMissingValueError:
        raise
    except OmegaConfBaseException as error:
        raise ValueError(_explain(error)) from error


def _to_plain(value: DictConfig | ListConfig) -> Any:
    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(_explain(error)) from error


def _explain(error: OmegaConfBaseException) -> str:
    message = str(error).splitlines()[0]
    if isinstance(error, InterpolationResolutionError) and "Environment variable" in message:
        name = message.split("'")[1]
        return f"{_UNSET} {name} is not set: export {name}=..., or give the key on the command line"
    return f"cannot be resolved: {message}"


def convert(value: Any, hint: Any) -> Any:
    """`value` as the type of `hint`. Raises ValueError: "found 'abc', expected a float"."""
    for option in union_options(hint):
        try:
            return _convert_to(value, option)
        except TypeError:
            continue
    expected = describe_type(hint)
    article = "" if expected.startswith("true") else "an " if expected[0] in "aeiou" else "a "
    raise ValueError(f"found {_show(value)}, expected {article}{expected}")


def _convert_to(value: Any, hint: Any) -> Any:
    """Raises TypeError where the value is of another type."""
    if isinstance(value, str) and hint in (bool, int, float):
        value = _read_text(value)
    origin, is_number = get_origin(hint), isinstance(value, int | float) and not isinstance(value, bool)
    if hint is Any:
        return value
    if origin is list and isinstance(value, list):
        return [convert(member, get_args(hint)[0]) for member in value]
    if origin is dict and isinstance(value, dict):
        return {str(name): convert(member, get_args(hint)[1]) for name, member in value.items()}
    if hint is int and is_number and math.isfinite(value) and value == int(value):
        return int(value)  # 1e4 is read as a float and meant as an integer
    if hint is float and is_number and math.isfinite(value):
        return float(value)
    if hint is str and is_number:
        return str(value)  # run_dir=7
    if type(value) is hint and not is_number:  # not isinstance: true is an int to Python
        return value
    raise TypeError


def _read_text(text: str) -> Any:
    """The number or truth value that a text spells, else the text itself: environment variables are always texts."""
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, str) else to_yaml_text(value)


def _check_rules(value: Any, rules: dict[str, Any]) -> None:
    for member in value if isinstance(value, list) else [value]:
        if member is None or isinstance(member, dict):
            continue
        if member not in rules.get("choices", [member]):
            hint = f"; the nearest is {nearest(str(member), list(rules['choices']))}"
            raise ValueError(f"found {_show(member)}, expected {describe_rules(rules)}{hint}")
        holds = {
            "gt": lambda bound, member=member: member > bound,
            "ge": lambda bound, member=member: member >= bound,
            "lt": lambda bound, member=member: member < bound,
            "le": lambda bound, member=member: member <= bound,
        }
        if not all(check(rules[name]) for name, check in holds.items() if name in rules):
            raise ValueError(f"found {_show(member)}, expected a value {describe_rules(rules)}")


def _unknown_keys(node: DictConfig, name: Any, path: str) -> list[Problem]:
    """One problem for each value under an unknown key, so that every line of a misspelt section is named."""
    value = None if OmegaConf.is_interpolation(node, name) or OmegaConf.is_missing(node, name) else node[name]
    if isinstance(value, DictConfig) and len(value):
        return [problem for child in value for problem in _unknown_keys(value, child, f"{path}.{child}")]
    return [unknown_key(path)]


def unknown_key(path: str) -> Problem:
    """The problem of a key that the schema does not have."""
    return Problem(path, f"unknown key; the nearest is {' or '.join(nearest_keys(path, TrainConfig))}")
