r"""When a found answer equals the expected one: the rules of `math_boxed`.

An answer is read as a group of answers (tuple, interval, set, list, union, matrix), an equation, or a quantity.
- `1,2` and `\{1,2\}` and `1 \text{ or } 2` are sets, equal in any order; `(1,2)`, `[1,2)` and matrices are ordered,
  and their brackets count. `1,000` alone is a number. A set of one element is that element.
- `x=42` equals 42, where the name is alone on its side; `x=\frac84=2` needs every side right. `x^2+y^2=4` equals
  equations that differ by a constant factor, and no number.
- `x>2`, `1<x\le 3` and `x\in(1,3]` are intervals. `a\pm b` is the set of both.
- Anything else equals only its own text.
"""

import re
from collections import Counter
from dataclasses import dataclass

from unirl.reward.local.evaluate import equations_equal
from unirl.reward.local.expression import MAX_CHARS, Node, parse
from unirl.reward.local.latex import clean, closing, split, split_with_separators, strip_outer
from unirl.reward.local.quantity import Quantity, quantities_equal, read_quantity

MAX_LEVELS = 8
MAX_UNORDERED = 32

_INTEGER = re.compile(r"[-+]?\d{1,18}")
_THOUSANDS = re.compile(r"(?P<head>[^,]*(?<![\d.]))?(?P<number>\d{1,3}(?:,\d{3})+)(?P<tail>(?!\d)[^,]*)")
_NAME = re.compile(
    r"(?:\\text\{[^{}]*[A-Za-z][^{}]*\}|\\[A-Za-z]+|[A-Za-z][A-Za-z ]*)(?:_(?:\w|\{[^{}]*\}))?'*(?:\([A-Za-z, ]*\))?"
)
_MATRIX = re.compile(
    r"\\begin\{(?P<kind>[bpBvV]?matrix|array)\}(?:\{[lcr|]*\})?(?P<body>.*)\\end\{(?P=kind)\}", re.DOTALL
)
_SMALLER, _LARGER = ("<", "\\leq"), (">", "\\geq")
_CONSTANT_NAMES = frozenset(("e", "i", "\\pi", "\\infty", "\\emptyset"))


@dataclass(frozen=True)
class Group:
    """kind: "set" or "union" (any order), "matrix", or the pair of brackets; rows of a matrix are groups themselves."""

    kind: str
    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Equation:
    """names: sides that are a bare name; values: the other sides; residual: left minus right, where that is a tree."""

    names: frozenset[str]
    values: tuple["Answer", ...]
    residual: Node | None


Answer = Group | Equation | Quantity


def answers_equal(gold: str, found: str) -> bool:
    """Whether the found answer equals the expected one, both LaTeX or plain text."""
    gold, found = gold.strip(), found.strip()
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(found):
        return int(gold) == int(found)
    if len(gold) > MAX_CHARS or len(found) > MAX_CHARS:
        return gold.split() == found.split()
    gold, found = clean(gold), clean(found)
    return gold == found or _equal(read_answer(gold), read_answer(found))


def read_answer(text: str, level: int = 0) -> Answer:
    """Take cleaned text apart."""
    text = strip_outer(text)
    if level >= MAX_LEVELS:
        return Quantity(text, None)
    if "\\pm" in text or "\\mp" in text:
        return _both_signs(text, level)
    if level == 0 and (match := _THOUSANDS.fullmatch(text)):
        text = f"{match['head'] or ''}{match['number'].replace(',', '')}{match['tail']}"
    for reader in (_read_list, _read_relation, _read_bracket, _read_matrix):
        if (answer := reader(text, level + 1)) is not None:
            return answer
    return read_quantity(text)


def _both_signs(text: str, level: int) -> Answer:
    upper = re.sub(r"\\pm(?![A-Za-z])", "+", re.sub(r"\\mp(?![A-Za-z])", "-", text))
    lower = re.sub(r"\\pm(?![A-Za-z])", "-", re.sub(r"\\mp(?![A-Za-z])", "+", text))
    if "\\pm" in upper or "\\mp" in upper:
        return Quantity(text, None)
    return _set([read_answer(upper, level + 1), read_answer(lower, level + 1)])


def _set(items: list[Answer]) -> Answer:
    """A set; sets among the items (both signs of a root) are opened."""
    opened: list[Answer] = []
    for item in items:
        opened += item.items if isinstance(item, Group) and item.kind == "set" else (item,)
    return opened[0] if len(opened) == 1 else Group("set", tuple(opened))


def _read_list(text: str, level: int) -> Answer | None:
    for separators, kind in (((",", ";"), "set"), (("\\cup",), "union")):
        parts = split(text, separators)
        if len(parts) > 1:
            if not all(parts):
                return Quantity(text, None)
            items = [read_answer(part, level) for part in parts]
            return _set(items) if kind == "set" else Group(kind, tuple(items))
    return None


def _read_relation(text: str, level: int) -> Answer | None:
    name, *rest = split(text, ("\\in",))
    if len(rest) == 1 and _NAME.fullmatch(name):
        return read_answer(rest[0], level)
    sides, relations = split_with_separators(text, (*_SMALLER, *_LARGER))
    if relations:
        return _read_inequality(sides, relations, level)
    sides = split(text, ("=",))
    if len(sides) > 1:
        return _read_equation(text, sides, level)
    return None


def _read_inequality(sides: list[str], relations: list[str], level: int) -> Answer | None:
    """Inequalities about one name are intervals."""
    if all(relation in _LARGER for relation in relations):
        sides, relations = sides[::-1], [_SMALLER[_LARGER.index(relation)] for relation in relations[::-1]]
    if not all(sides) or not all(relation in _SMALLER for relation in relations):
        return None
    are_names = [_is_name(side) for side in sides]
    if are_names == [False, True, False]:
        (low, _, high), (left, right) = sides, relations
    elif are_names == [True, False]:
        (low, high), (left, right) = ("-\\infty", sides[1]), ("<", relations[0])
    elif are_names == [False, True]:
        (low, high), (left, right) = (sides[0], "\\infty"), (relations[0], "<")
    else:
        return None
    kind = ("(" if left == "<" else "[") + (")" if right == "<" else "]")
    return Group(kind, (read_answer(low, level), read_answer(high, level)))


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and text not in _CONSTANT_NAMES


def _read_equation(text: str, sides: list[str], level: int) -> Answer:
    if not all(sides):
        return Quantity(text, None)
    names = [side for side in sides if _is_name(side)]
    values = [side for side in sides if not _is_name(side)]
    if not values:
        names, values = sides[:-1], sides[-1:]
    trees = [parse(side) for side in sides] if len(sides) == 2 else []
    residual = ("sum", ((1, trees[0]), (-1, trees[1]))) if trees and all(trees) else None
    return Equation(frozenset(names), tuple(read_answer(value, level) for value in values), residual)


def _read_bracket(text: str, level: int) -> Answer | None:
    opening = "\\{" if text.startswith("\\{") else text[:1]
    if opening not in ("(", "[", "\\{") or closing(text, 0) != len(text) - 1:
        return None
    if opening == "\\{":
        if not text.endswith("\\}"):
            return None
        inner = text[2:-2].strip()
        return Quantity("\\emptyset", None) if not inner else _set([_read_items(inner, level)])
    parts = split(text[1:-1], (",", ";"))
    if len(parts) == 1 or not all(parts):
        return read_answer(parts[0], level) if text[-1] == {"(": ")", "[": "]"}[opening] and parts[0] else None
    return Group(opening + text[-1], tuple(read_answer(part, level) for part in parts))


def _read_items(inner: str, level: int) -> Answer:
    return _read_list(inner, level) or read_answer(inner, level)


def _read_matrix(text: str, level: int) -> Answer | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row for row in re.split(r"\\newline(?![A-Za-z])", match["body"]) if row.strip()]
    cells = [tuple(read_answer(cell, level) for cell in split(row, ("&",))) for row in rows]
    return Group("matrix", tuple(Group("matrix", row) for row in cells))


def _equal(gold: Answer, found: Answer) -> bool:
    if isinstance(gold, Equation) or isinstance(found, Equation):
        return _equations_equal(gold, found)
    if isinstance(gold, Group) and isinstance(found, Group):
        if gold.kind != found.kind or len(gold.items) != len(found.items):
            return False
        if gold.kind in ("set", "union"):
            return _equal_in_any_order(gold.items, found.items)
        return all(map(_equal, gold.items, found.items))
    return isinstance(gold, Quantity) and isinstance(found, Quantity) and quantities_equal(gold, found)


def _equations_equal(gold: Answer, found: Answer) -> bool:
    if isinstance(gold, Equation) and isinstance(found, Equation):
        if gold.names & found.names or (gold.names and found.names and not (gold.residual and found.residual)):
            same_names = bool(gold.names & found.names)
            return same_names and all(_equal(gold.values[-1], value) for value in found.values)
        return bool(gold.residual and found.residual) and equations_equal(gold.residual, found.residual)
    if isinstance(gold, Equation):
        return bool(gold.names) and _equal(gold.values[-1], found)
    return all(_equal(gold, value) for value in found.values)


def _equal_in_any_order(gold: tuple[Answer, ...], found: tuple[Answer, ...]) -> bool:
    if _have_different_names(gold) and not any(isinstance(item, Equation) for item in found):
        return all(map(_equal, gold, found))  # x=1, y=2 against 1, 2: the order tells which is which.
    if len(gold) > MAX_UNORDERED:
        return Counter(map(str, gold)) == Counter(map(str, found))
    left = list(found)
    for item in gold:
        match = next((other for other in left if _equal(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _have_different_names(items: tuple[Answer, ...]) -> bool:
    return len({item.names for item in items if isinstance(item, Equation)}) > 1
