"""Configs of the functions here from plain dicts, and the rules that stand beside their keys; no torch."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

Config = TypeVar("Config")


def as_config(cls: type[Config], config: Config | Mapping[str, Any]) -> Config:
    """`config` itself where it is a `cls`, else a `cls` made of its keys, nested sections included.

    Raises ValueError on a key that `cls` lacks, with the nearest one, and on a key without default that is missing.
    """
    if isinstance(config, cls):
        return config
    if not isinstance(config, Mapping):
        found = type(config).__name__
        raise TypeError(f"{cls.__name__}: found {found}, expected a {cls.__name__} or a dict of its keys")
    known = {f.name: f for f in fields(cls)}
    for name in config:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ValueError(f"{cls.__name__}: unknown key {name!r}; {hint}")
    for name, f in known.items():
        if name not in config and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{cls.__name__}: missing key {name!r}: {f.metadata['doc']}")
    return cls(**{name: _nested(known[name], value) for name, value in config.items()})


def _nested(f: Field, value: Any) -> Any:
    section = next((option for option in _options(f.type) if is_dataclass(option)), None)
    return value if section is None or value is None else as_config(section, value)


def key_problems(config: Any, keys: Iterable[Field] | None = None, prefix: str = "") -> list[str]:
    """What is wrong with single keys: type, choice, bound, or a number that is not finite; "key: found ..." each.

    `keys`: those judged; None takes all. Nested sections are not judged here.
    """
    found = ((f.name, _key_problem(f, getattr(config, f.name))) for f in (fields(config) if keys is None else keys))
    return [f"{prefix}{name}: {problem}" for name, problem in found if problem is not None]


def _key_problem(f: Field, value: Any) -> str | None:
    rules = f.metadata
    if not any(_fits(value, option) for option in _options(f.type)):
        return f"found {value!r}, expected {' or '.join(_in_words(option) for option in _options(f.type))}"
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"found {value}, expected a finite number"
    if "choices" in rules and value not in rules["choices"]:
        near = get_close_matches(str(value), rules["choices"], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"found {value!r}, expected one of {', '.join(rules['choices'])}{hint}"
    holds = {
        "gt": (">", lambda bound: value > bound),
        "ge": (">=", lambda bound: value >= bound),
        "lt": ("<", lambda bound: value < bound),
        "le": ("<=", lambda bound: value <= bound),
    }
    for name, (sign, check) in holds.items():
        if name in rules and not check(rules[name]):
            return f"found {value}, expected a number {sign} {rules[name]}"
    return None


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    if hint is float or hint is int:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # A whole number is read as a float from some sources: 8192.0.
        return is_number and (hint is float or isinstance(value, int) or value.is_integer())
    if get_origin(hint) is dict:
        return isinstance(value, Mapping)
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    names = {float: "a number", int: "an integer", bool: "true or false", str: "a text", type(None): "null"}
    return names.get(hint, "a section")
