"""Overrides of the command line, `key=value`, made ready for Hydra: what it would refuse with words of its own, or let
through, is found here or later by the typed build, together with everything else that is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from unirl.config.build import unknown_key
from unirl.config.catalog import nearest
from unirl.config.problem import Problem
from unirl.config.schema import TrainConfig

_ROOT_KEYS = {item.name for item in fields(TrainConfig)}


def read_overrides(texts: Sequence[str], presets: Mapping[str, Sequence[str]]) -> tuple[list[str], list[Problem]]:
    """Overrides that Hydra accepts, and what is wrong with the others. `presets`: names of the presets by section."""
    lines, problems = [], []
    for text in texts:
        try:
            lines.append(_read_override(text, presets))
        except ValueError as error:
            problems.append(Problem(text, str(error)))
    return lines, problems


def one_line(error: BaseException) -> str:
    """The message of an error, or of what caused it where it has none, without its line breaks."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    return " ".join(line.strip() for line in text.splitlines() if line.strip() and "https://hydra.cc" not in line)


def _read_override(text: str, presets: Mapping[str, Sequence[str]]) -> str:
    """Raises ValueError with what is wrong."""
    override = _parse(text)
    name = override.key_or_group
    if name.partition(".")[0] not in _ROOT_KEYS:
        raise ValueError(unknown_key(name).message)
    if name in presets and override.type != OverrideType.DEL:
        _check_preset(override, presets[name])
        return text
    if override.type in (OverrideType.CHANGE, OverrideType.ADD):
        # Forced in: a key that the schema lacks is then found by the typed build, by its nearest name.
        return f"++{text.lstrip('+')}"
    return text


def _parse(text: str) -> Override:
    if "=" not in text and not text.startswith("~"):
        raise ValueError("is no override: config keys are given as key=value")
    key, _, value = text.partition("=")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ValueError(
            f"cannot be read ({one_line(error)}); a value with special characters is quoted: '{key}=\"{value}\"'"
        ) from error
    if override.is_sweep_override():
        raise ValueError(f"gives several values; a list is written '{key}=[{value}]', a text '{key}=\"{value}\"'")
    return override


def _check_preset(override: Override, known: Sequence[str]) -> None:
    section, value = override.key_or_group, override.value()
    if not isinstance(value, str):
        raise ValueError(f"expected a preset ({', '.join(known)}); single keys are set as {section}.KEY=VALUE")
    if value not in known:
        raise ValueError(f"no such preset; the nearest is {nearest(value, list(known))} (of {', '.join(known)})")
