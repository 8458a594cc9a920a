"""Equality of expressions by their values, in bounded time.

Rational values are exact; all others are computed to `DIGITS` digits. Expressions with free symbols are compared at
points drawn once and for all: two rational functions that agree there are the same but for a negligible chance
(Schwartz-Zippel). No operation is carried out whose result would exceed `MAX_BITS`.
"""

import math
import random
import threading
from fractions import Fraction
from typing import Any

import mpmath

from unirl.reward.local.expression import Node, symbols

DIGITS = 80
TOLERANCE = 1e-50
MAX_BITS = 20_000
MAX_FACTORIAL = 1000
MAX_BINOMIAL = 5000
NUM_POINTS = 12
MIN_POINTS = 3

_BASE_TWO = math.log(2)
_FUNCTION_NAMES = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh",
}  # fmt: skip


class TooLargeError(Exception):
    """A value has more than `MAX_BITS` bits before or after the point, or a function is asked for too much."""


class UndefinedError(Exception):
    """There is no value: a division by zero, a logarithm of zero, a factorial of a fraction."""


class _Arithmetic(threading.local):
    """mpmath keeps its precision in the context, which threads must not share."""

    def __init__(self) -> None:
        self.context = mpmath.MPContext()
        self.context.dps = DIGITS


_arithmetic = _Arithmetic()


def values_equal(left: Node, right: Node) -> bool:
    """Whether two expressions have one value wherever both are real (or everywhere, where they hardly ever are).

    False where a value is undefined or too large to compute.
    """
    pairs = _value_pairs(left, right)
    return bool(pairs) and all(_close(a, b) for a, b in pairs)


def equations_equal(left: Node, right: Node) -> bool:
    """Whether the equations `left = 0` and `right = 0` are the same but for a constant factor."""
    pairs = _value_pairs(left, right)
    if len(pairs) < MIN_POINTS or any(_is_zero(a) or _is_zero(b) for a, b in pairs):
        return False
    ratios = [_divide(a, b) for a, b in pairs]
    return all(_close(ratio, ratios[0]) for ratio in ratios)


def _value_pairs(left: Node, right: Node) -> list[tuple[Any, Any]]:
    """Values where both are defined: the real ones where there are enough, else all. Empty: no verdict."""
    names = sorted(symbols(left) | symbols(right))
    pairs = []
    for index in range(NUM_POINTS if names else 1):
        point = {name: _coordinate(name, index) for name in names}
        try:
            pairs.append((evaluate(left, point), evaluate(right, point)))
        except UndefinedError:
            continue
        except TooLargeError:
            return []
    if not names:
        return pairs
    real = [pair for pair in pairs if all(_is_real(value) for value in pair)]
    chosen = real if len(real) >= MIN_POINTS else pairs
    return chosen if len(chosen) >= MIN_POINTS else []


def _coordinate(name: str, index: int) -> Fraction:
    """Every other point has only positive coordinates, since roots and logarithms are real there."""
    drawn = Fraction(random.Random(f"{name}/{index}").randint(100, 999), 211)
    return -drawn if index % 2 and random.Random(f"sign of {name}/{index}").random() < 0.5 else drawn


def evaluate(node: Node, point: dict[str, Fraction]) -> Any:
    """The value of a tree: a Fraction, or an mpmath number. Raises TooLargeError or UndefinedError."""
    return _bounded(_evaluate(node, point))


def _evaluate(node: Node, point: dict[str, Fraction]) -> Any:
    context = _arithmetic.context
    match node:
        case ("number", value):
            return value
        case ("symbol", name):
            return point[name]
        case ("constant", name):
            return {"pi": +context.pi, "e": +context.e, "i": context.mpc(0, 1)}[name]
        case ("sum", terms):
            return _sum(terms, point)
        case ("product", factors):
            return _product(factors, point)
        case ("power", base, exponent):
            return _power(evaluate(base, point), evaluate(exponent, point))
        case ("root", degree, radicand):
            return _root(evaluate(degree, point), evaluate(radicand, point))
        case ("factorial", operand):
            return Fraction(math.factorial(_natural(evaluate(operand, point), MAX_FACTORIAL)))
        case ("binomial", n, k):
            n, k = (_natural(evaluate(each, point), MAX_BINOMIAL) for each in (n, k))
            return Fraction(math.comb(n, k))
        case ("log", base, argument):
            return _divide(_logarithm(evaluate(argument, point)), _logarithm(evaluate(base, point)))
        case ("function", name, argument):
            return _function(name, evaluate(argument, point))
    raise AssertionError(node[0])


def _sum(terms: tuple[tuple[int, Node], ...], point: dict[str, Fraction]) -> Any:
    total: Any = Fraction(0)
    for sign, term in terms:
        value = evaluate(term, point)
        if isinstance(total, Fraction) and isinstance(value, Fraction):
            total = _bounded(total + sign * value)
        else:
            total = _inexact(total) + sign * _inexact(value)
    return total


def _product(factors: tuple[tuple[Node, bool], ...], point: dict[str, Fraction]) -> Any:
    total: Any = Fraction(1)
    for factor, divides in factors:
        value = evaluate(factor, point)
        if divides:
            total = _divide(total, value)
        elif isinstance(total, Fraction) and isinstance(value, Fraction):
            total = total * value
        else:
            total = _inexact(total) * _inexact(value)
        total = _bounded(total)
    return total


def _divide(top: Any, bottom: Any) -> Any:
    if _is_zero(bottom):
        raise UndefinedError
    if isinstance(top, Fraction) and isinstance(bottom, Fraction):
        return top / bottom
    return _inexact(top) / _inexact(bottom)


def _power(base: Any, exponent: Any) -> Any:
    if _is_zero(base):
        if not _is_real(exponent) or exponent <= 0:
            raise UndefinedError
        return Fraction(0)
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        if isinstance(base, Fraction) and abs(base) != 1:
            _refuse_above(abs(exponent) * (_bits(base) - 1))
        elif not isinstance(base, Fraction):
            _refuse_above(abs(exponent * _arithmetic.context.mag(base)))
        return base ** int(exponent)
    scale = _inexact(exponent) * _logarithm(base)
    _refuse_above(abs(scale) / _BASE_TWO)
    return _arithmetic.context.exp(scale)


def _root(degree: Any, radicand: Any) -> Any:
    """The principal root, but the real one of a negative number where the degree is odd."""
    degree = _natural(degree, MAX_FACTORIAL)
    if degree == 0:
        raise UndefinedError
    if degree % 2 and _is_real(radicand) and radicand < 0:
        return -_power(-radicand, Fraction(1, degree))
    return _power(radicand, Fraction(1, degree))


def _function(name: str, argument: Any) -> Any:
    context = _arithmetic.context
    match name:
        case "abs":
            return abs(argument)
        case "floor" | "ceil":
            if not _is_real(argument):
                raise UndefinedError
            if not isinstance(argument, Fraction):
                nearest = context.nint(argument)
                argument = nearest if abs(argument - nearest) < TOLERANCE else argument
            return Fraction(int({"floor": math.floor, "ceil": math.ceil}[name](argument)))
        case "ln":
            return _logarithm(argument)
        case "exp":
            return _power(+context.e, argument)
        case "sinh" | "cosh" | "tanh":
            _refuse_above(abs(argument))
        case _ if not _is_real(argument):
            _refuse_above(abs(argument))
    try:
        return getattr(context, _FUNCTION_NAMES.get(name, name))(_inexact(argument))
    except (ZeroDivisionError, ValueError) as error:
        raise UndefinedError from error


def _logarithm(value: Any) -> Any:
    if _is_zero(value):
        raise UndefinedError
    return _arithmetic.context.log(_inexact(value))


def _natural(value: Any, largest: int) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
        raise UndefinedError
    if value > largest:
        raise TooLargeError
    return int(value)


def _inexact(value: Any) -> Any:
    if isinstance(value, Fraction):
        return _arithmetic.context.mpf(value.numerator) / value.denominator
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, Fraction):
        _refuse_above(_bits(value))
    elif not _arithmetic.context.isfinite(value):
        raise UndefinedError
    elif value:
        _refuse_above(abs(_arithmetic.context.mag(value)))
        if abs(value.imag) < TOLERANCE * max(1, abs(value.real)):
            return value.real
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _refuse_above(bits: Any) -> None:
    if bits > MAX_BITS:
        raise TooLargeError


def _is_zero(value: Any) -> bool:
    return value == 0 if isinstance(value, Fraction) else abs(value) < TOLERANCE


def _is_real(value: Any) -> bool:
    return isinstance(value, Fraction | _arithmetic.context.mpf)


def _close(left: Any, right: Any) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = _inexact(left), _inexact(right)
    return abs(left - right) <= TOLERANCE * max(1, abs(left), abs(right))
