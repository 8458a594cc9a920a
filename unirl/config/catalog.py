"""All keys of the schema as a flat list: what help, reference and error messages are made from."""

import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import SequenceMatcher
from typing import Any, Union, get_args, get_origin, get_type_hints

MANDATORY = "???"

_TYPE_NAMES = {bool: "true or false", int: "integer", float: "float", str: "text", Any: "any value", type(None): "null"}


@dataclass(frozen=True)
class KeyEntry:
    """One key: dotted path, type and rule in words, default as it is written in YAML, doc."""

    path: str
    type: str
    default: str
    rule: str
    doc: str
    is_section: bool = False


def walk(schema: type, prefix: str = "", instance: Any = None) -> Iterator[KeyEntry]:
    """Every key and section of a schema dataclass: its own keys first, then each section followed by what it holds.

    `instance`: the section's default where a parent declares one that differs from the class's own.
    """
    hints = get_type_hints(schema)
    for item in sorted(fields(schema), key=lambda item: section_class(hints[item.name]) is not None):
        path, hint = f"{prefix}{item.name}", hints[item.name]
        default = default_of(item) if instance is None else getattr(instance, item.name)
        section = section_class(hint)
        rule = describe_rules(item.metadata)
        yield KeyEntry(
            path=path,
            type=describe_type(hint),
            default="" if section else to_yaml_text(default),
            rule=f"each {rule}" if rule and get_origin(hint) is list else rule,
            doc=item.metadata.get("doc", ""),
            is_section=section is not None,
        )
        if section:
            yield from walk(section, f"{path}.", None if default == MANDATORY else default)


def default_tree(schema: Any) -> Any:
    """The schema's defaults as nested plain dicts, lists and values; `schema` is a dataclass or an instance of one."""
    if not is_dataclass(schema):
        return schema
    if isinstance(schema, type):
        return {item.name: default_tree(default_of(item)) for item in fields(schema)}
    return {item.name: default_tree(getattr(schema, item.name)) for item in fields(schema)}


def default_of(item: Field) -> Any:
    """The default of a field; `MANDATORY` where it has none."""
    if item.default_factory is not MISSING:
        return item.default_factory()
    return MANDATORY if item.default is MISSING else item.default


def section_class(hint: Any) -> type | None:
    """The dataclass behind a type hint (also behind `X | None`), or None where the hint is that of a value."""
    for option in union_options(hint):
        if is_dataclass(option):
            return option
    return None


def union_options(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the hint itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def describe_type(hint: Any) -> str:
    """A type in words that a user without Python understands: "float", "list of integer", "text or null"."""
    options = union_options(hint)
    if len(options) > 1:
        return " or ".join(describe_type(option) for option in options)
    if get_origin(hint) is list:
        return f"list of {describe_type(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "mapping"
    if is_dataclass(hint):
        return "section"
    return _TYPE_NAMES[hint]


def describe_rules(rules: dict[str, Any]) -> str:
    """The rules of a key in words: "one of a, b", "> 0 and <= 1", or "" where it has none."""
    if "choices" in rules:
        return f"one of {', '.join(rules['choices'])}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return " and ".join(f"{sign} {rules[name]:g}" for name, sign in signs.items() if name in rules)


def nearest(name: str, known: list[str]) -> str:
    """The member of `known` (not empty) that is spelt most like `name`."""
    return max(known, key=lambda candidate: _likeness(name, candidate))


def nearest_keys(path: str, schema: type) -> list[str]:
    """The dotted paths of the schema that are spelt most like `path`: one, or several that end in the same name."""
    paths = [entry.path for entry in walk(schema) if not entry.is_section]
    same_name = [known for known in paths if _leaf(known) == _leaf(path)]
    if same_name:
        best = nearest(path, same_name)
        if _likeness(path, best) > 0.9:
            return [best]
        return sorted(same_name, key=lambda known: known.count("."))[:3]
    return [max(paths, key=lambda known: sum(map(_likeness, _parts(path), _parts(known))))]


def _likeness(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower()).ratio()


def _parts(path: str) -> tuple[str, str, str]:
    section, _, leaf = path.rpartition(".")
    return path, section, leaf


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def to_yaml_text(value: Any) -> str:
    """A value on one line as it would be written in a recipe."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(to_yaml_text(member) for member in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {to_yaml_text(member)}' for name, member in value.items())}}}"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
