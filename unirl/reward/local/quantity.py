r"""A number or expression with what may hang on it: a percent sign, a currency, a unit, a word such as million."""

import re
from dataclasses import dataclass
from fractions import Fraction

from unirl.reward.local.evaluate import values_equal
from unirl.reward.local.expression import Node, parse
from unirl.reward.local.latex import strip_outer

_TRAILING_TEXT = re.compile(
    r"(?P<value>.*[^\s^_{(*/+-])\s*\\text\{(?P<words>[^{}\\]*)\}\s*(?:\^\{?(?P<power>[23])\}?)?", re.DOTALL
)
_TRAILING_WORDS = re.compile(
    r"(?P<value>[-+]?(?:[\d.,/]+|\\frac\{\d+\}\{\d+\}))(?P<gap>\s?)(?P<words>[A-Za-z][A-Za-z /]*)"
    r"(?:\^\{?(?P<power>[23])\}?)?"
)
# Not behind a command: the degrees of \sin 30^\circ belong to the argument.
_DEGREE = re.compile(
    r"(?P<value>[^\\]*[^\s^_{(*/+\\-]|-?\\frac\{\d+\}\{\d+\})\\degree\s*(?:\\text\{)?\s*(?P<scale>[CF]?)\s*\}?"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z./ -]*")
_MULTIPLIERS = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12
}  # fmt: skip
_NO_UNIT = frozenset((
    "or", "and", "not", "no", "nor", "about", "approximately", "than", "least", "most", "below", "above", "to", "from",
    "mod", "if", "is", "e", "i",
))  # fmt: skip
_SHORT_UNITS = {
    "mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "in": "inch", "ft": "foot", "yd": "yard",
    "mi": "mile", "mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "pound", "oz": "ounce", "ml": "milliliter",
    "l": "liter", "s": "second", "sec": "second", "min": "minute", "h": "hour", "hr": "hour", "inches": "inch",
    "feet": "foot", "mph": "mile/hour", "kmh": "kilometer/hour", "deg": "degree", "usd": "dollar",
    "n": "newton", "j": "joule", "w": "watt", "v": "volt", "k": "kelvin",
}  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """text: what is left once the rest is taken away; node: its tree, or None; unit: one name for each unit, or ""."""

    text: str
    node: Node | None
    is_percent: bool = False
    unit: str = ""


def read_quantity(text: str) -> Quantity:
    """Take cleaned text apart. Words that are no unit stay, and make the whole a text that is no expression."""
    unit, scale, is_percent = "", 1, False
    if match := _DEGREE.fullmatch(text):
        text, unit = match["value"], f"degree {match['scale']}".strip()
    elif (match := _TRAILING_TEXT.fullmatch(text)) and (read := _read_words(match["words"], match["power"])):
        text, (unit, scale) = match["value"], read
    elif (match := _TRAILING_WORDS.fullmatch(text)) and _are_bare_unit(match["words"], match["gap"]):
        read = _read_words(match["words"], match["power"])
        if read:
            text, (unit, scale) = match["value"], read
    if unit in ("percent", "pct"):
        unit, is_percent = "", True
    elif text.endswith("%"):
        text, is_percent = text[:-1], True
    text = strip_outer(text)
    node = parse(text)
    if node is not None and scale != 1:
        node = ("product", ((node, False), (("number", Fraction(scale)), False)))
        text = f"{text}*{scale}"
    return Quantity(text, node, is_percent, unit)


def quantities_equal(gold: Quantity, found: Quantity) -> bool:
    """Same value. A unit may be left out, but not exchanged; 50% equals 50 and 1/2."""
    if gold.unit and found.unit and gold.unit != found.unit:
        return False
    if _same_text(gold.text, found.text):
        return True
    if gold.node is None or found.node is None:
        return False
    if values_equal(gold.node, found.node):
        return True
    if gold.is_percent != found.is_percent:
        percent, plain = (gold.node, found.node) if gold.is_percent else (found.node, gold.node)
        return values_equal(("product", ((percent, False), (("number", Fraction(100)), True))), plain)
    return False


def _same_text(gold: str, found: str) -> bool:
    if gold == found:
        return True
    words = [re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).split() for text in (gold, found)]
    if words[0] == words[1]:
        return True
    # Words in any case; a single letter is a variable or a choice, and `a` is not `A`.
    joined = [" ".join(each) for each in words]
    return all(re.fullmatch(r"[A-Za-z' -]{2,}", text) for text in joined) and joined[0].lower() == joined[1].lower()


def _read_words(words: str, power: str | None) -> tuple[str, int] | None:
    """(unit, factor) of the words behind a number; None where they are not a unit."""
    parts = words.lower().strip(" .").split()
    if not parts or not _WORDS.fullmatch(" ".join(parts)) or len(parts) > 4 or _NO_UNIT & set(parts):
        return None
    if any(len(part) == 1 and part not in _SHORT_UNITS for part in parts):
        return None  # A variable.
    scale = 1
    while parts and parts[0] in _MULTIPLIERS:
        scale *= _MULTIPLIERS[parts.pop(0)]
    if parts and parts[0] in ("square", "squared", "sq", "cubic"):
        power = "3" if parts.pop(0) == "cubic" else "2"
    names = "/".join(_singular(name) for name in re.split(r"[ /]+(?:per )?", " ".join(parts)))
    return (f"{names}^{power}" if power else names), scale


def _singular(name: str) -> str:
    name = name.strip(".")
    if name in _SHORT_UNITS:
        return _SHORT_UNITS[name]
    return name.removesuffix("s") if len(name) > 3 else name


def _are_bare_unit(words: str, gap: str) -> bool:
    """Whether words without a text command can be no product of variables: `12 apples`, `12cm`, but not `12xy`."""
    known = all(part in _SHORT_UNITS and len(part) > 1 for part in words.lower().split())
    return known or (bool(gap) and all(len(part) >= 4 for part in words.split()))
