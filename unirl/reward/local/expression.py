"""A strict parser of one mathematical expression, LaTeX or plain, into a tree of tuples.

latex2sympy, which math-verify uses, reads `12 34` as 46, `1010_2` as 1010 and `A` as `a`, and its time is exponential
in the nesting. This parser refuses what it does not know, and its time is linear.

Nodes: ("number", Fraction), ("symbol", name), ("constant", "pi" | "e" | "i"), ("sum", ((sign, node), ...)),
("product", ((node, divides), ...)), ("power", base, exponent), ("root", degree, node), ("factorial", node),
("binomial", n, k), ("function", name, node), ("log", base, node).
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]

MAX_CHARS = 1000
MAX_DEPTH = 40
MAX_DIGITS = 1000

_TOKEN = re.compile(r"\s+|\d+\.\d+|\d+\.(?=\\overline)|\.\d+|\d+|\\[A-Za-z]+|\\.|.", re.DOTALL | re.ASCII)
_NUMBER = re.compile(r"\d+\.?\d*|\.\d+", re.ASCII)
_WORD = re.compile(r"[A-Za-z]{3,}")
_GREEK = frozenset(
    f"\\{name}" for name in (
        "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
        "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "ell",
        "Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega", "infty",
    )
)  # fmt: skip
_CONSTANTS = {"\\pi": "pi", "e": "e", "i": "i"}
FUNCTIONS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan",
    "sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh", "exp", "ln",
))  # fmt: skip
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_BRACKETS = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}


class NotAnExpressionError(Exception):
    """The text is not an expression that this parser knows."""


def parse(text: str) -> Node | None:
    """The tree of cleaned text (`unirl.reward.local.latex.clean`), or None where it is not an expression.

    Plain words are not expressions, nor is anything over `MAX_CHARS` characters or `MAX_DEPTH` levels.
    """
    if not text or len(text) > MAX_CHARS or _is_prose(text):
        return None
    try:
        return _Parser(text).parse()
    except NotAnExpressionError:
        return None


def symbols(node: Node) -> frozenset[str]:
    """Names of the free symbols."""
    if node[0] == "symbol":
        return frozenset((node[1],))
    children = [child for part in node[1:] for child in _nodes(part)]
    return frozenset().union(*map(symbols, children))


def _nodes(part: Any) -> list[Node]:
    if not isinstance(part, tuple):
        return []
    if isinstance(part[0], str):
        return [part]
    return [item for pair in part for item in pair if isinstance(item, tuple)]


def _is_prose(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z' -]+", text) is not None and _WORD.search(text) is not None


class _Parser:
    def __init__(self, text: str):
        self.tokens = [token for token in _TOKEN.findall(text) if not token.isspace()]
        self.position = 0
        self.depth = 0
        self.in_bars = False

    def parse(self) -> Node:
        node = self.sum()
        if self.peek() is not None:
            raise NotAnExpressionError
        return node

    def peek(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if token is None or (expected is not None and token != expected):
            raise NotAnExpressionError
        self.position += 1
        return token

    def accept(self, token: str) -> bool:
        if self.peek() != token:
            return False
        self.position += 1
        return True

    def nested(self, rule: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotAnExpressionError
        node = rule()
        self.depth -= 1
        return node

    def signs(self) -> int:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        return sign

    def sum(self) -> Node:
        terms = [(self.signs(), self.product())]
        while self.peek() in ("+", "-"):
            terms.append((self.signs(), self.product()))
        return terms[0][1] if len(terms) == 1 and terms[0][0] == 1 else ("sum", tuple(terms))

    def product(self) -> Node:
        factors = [(self.power(), False)]
        while (token := self.peek()) is not None:
            if token in ("*", "/"):
                self.take()
                sign = self.signs()
                factor = self.power()
                factors.append((factor if sign == 1 else ("sum", ((-1, factor),)), token == "/"))
            elif self.begins_factor(token):
                factors = self.join(factors, self.power())
            else:
                break
        return factors[0][0] if len(factors) == 1 else ("product", tuple(factors))

    def join(self, factors: list[tuple[Node, bool]], factor: Node) -> list[tuple[Node, bool]]:
        r"""A factor that follows without an operator: a product, or the mixed number 1\frac{1}{2} = 3/2."""
        last, divides = factors[-1]
        if last[0] == "number" and last[1].denominator == 1 and not divides and _is_proper_fraction(factor):
            return [*factors[:-1], (("sum", ((1, last), (1, factor))), False)]
        return [*factors, (factor, False)]

    def begins_factor(self, token: str) -> bool:
        """Whether the token begins a factor that needs no operator before it; a number does not: 2 3 is not 6."""
        if token == "|":
            return not self.in_bars
        return token in _BRACKETS or token.isalpha() or (token.startswith("\\") and self.is_known(token))

    @staticmethod
    def is_known(command: str) -> bool:
        return (
            command in _GREEK
            or command in _CONSTANTS
            or command in ("\\frac", "\\sqrt", "\\binom", "\\log", "\\text")
            or command[1:] in FUNCTIONS
        )

    def power(self) -> Node:
        base = self.atom()
        while self.peek() in ("!", "\\degree"):
            base = ("factorial", base) if self.take() == "!" else ("product", ((base, False), (_DEGREE, False)))
        if self.accept("^"):
            return ("power", base, self.nested(self.exponent))
        return base

    def exponent(self) -> Node:
        sign = self.signs()
        node = self.power() if self.peek() != "{" else self.atom()
        return node if sign == 1 else ("sum", ((-1, node),))

    def atom(self) -> Node:
        token = self.take()
        if token == "\\text":
            token = self.letter_in_text()
        if _NUMBER.fullmatch(token):
            return self.number(token)
        if token in _BRACKETS:
            return self.bracket(token)
        if token == "|" and not self.in_bars:
            return self.absolute()
        if token in _CONSTANTS and self.peek() != "_":
            return ("constant", _CONSTANTS[token])
        if token in _GREEK or (len(token) == 1 and token.isascii() and token.isalpha()):
            return ("symbol", token + self.subscript())
        match token:
            case "\\frac":
                return ("product", ((self.argument(), False), (self.argument(), True)))
            case "\\binom":
                return ("binomial", self.argument(), self.argument())
            case "\\sqrt":
                degree = self.nested(lambda: self.bracket("[")) if self.accept("[") else _TWO
                return ("root", degree, self.argument())
        if token == "\\log" or (token[0] == "\\" and token[1:] in FUNCTIONS):
            return self.function(token[1:])
        raise NotAnExpressionError

    def letter_in_text(self) -> str:
        self.take("{")
        letter = self.take()
        self.take("}")
        if not letter.isalpha():
            raise NotAnExpressionError
        return letter

    def number(self, token: str) -> Node:
        if self.peek() == "_" or len(token) > MAX_DIGITS:
            raise NotAnExpressionError  # 1010_2 is a number in another base.
        if "." in token and self.accept("\\overline"):
            return self.repeating(token)
        return ("number", Fraction(token))

    def repeating(self, token: str) -> Node:
        self.take("{")
        period = self.take()
        self.take("}")
        if not re.fullmatch("[0-9]+", period) or len(period) > MAX_DIGITS:
            raise NotAnExpressionError
        decimals = len(token) - token.index(".") - 1
        return ("number", Fraction(token) + Fraction(int(period), (10 ** len(period) - 1) * 10**decimals))

    def bracket(self, opening: str) -> Node:
        in_bars, self.in_bars = self.in_bars, False
        node = self.nested(self.sum)
        self.in_bars = in_bars
        self.take(_BRACKETS[opening])
        if opening in ("\\lfloor", "\\lceil"):
            return ("function", opening[2:], node)
        return node

    def absolute(self) -> Node:
        self.in_bars = True
        node = self.nested(self.sum)
        self.in_bars = False
        self.take("|")
        return ("function", "abs", node)

    def argument(self) -> Node:
        r"""An argument of \frac, \sqrt or \binom: a group, or else one digit, letter or command, as TeX takes it."""
        token = self.peek()
        if token is not None and len(token) > 1 and re.fullmatch("[0-9]+", token):
            self.tokens[self.position : self.position + 1] = [token[0], token[1:]]
        return self.nested(self.atom)

    def subscript(self) -> str:
        if not self.accept("_"):
            return ""
        token = self.take()
        if token != "{":
            return f"_{token}"
        parts = []
        while (token := self.take()) != "}":
            parts.append(token)
        return f"_{''.join(parts)}"

    def function(self, name: str) -> Node:
        base = self.argument() if name == "log" and self.accept("_") else _TEN
        exponent = self.nested(self.exponent) if self.accept("^") else None
        if exponent == _MINUS_ONE and name in _INVERSE:
            name, exponent = _INVERSE[name], None
        argument = self.nested(self.function_argument)
        node = ("log", base, argument) if name == "log" else ("function", name, argument)
        return node if exponent is None else ("power", node, exponent)

    def function_argument(self) -> Node:
        r"""A bracket, or the factors up to the next operator or function: \sin 2x \cos x is sin(2x) cos(x)."""
        if self.peek() in _BRACKETS:
            return self.atom()
        factors = [(self.power(), False)]
        while (token := self.peek()) is not None and self.begins_factor(token) and not self.is_function(token):
            factors.append((self.power(), False))
        return factors[0][0] if len(factors) == 1 else ("product", tuple(factors))

    @staticmethod
    def is_function(token: str) -> bool:
        return token == "\\log" or token[1:] in FUNCTIONS


_TWO, _TEN = ("number", Fraction(2)), ("number", Fraction(10))
_MINUS_ONE = ("sum", ((-1, ("number", Fraction(1))),))
_DEGREE = ("product", ((("constant", "pi"), False), (("number", Fraction(180)), True)))


def _is_proper_fraction(node: Node) -> bool:
    if node[0] != "product" or len(node[1]) != 2:
        return False
    (top, _), (bottom, divides) = node[1]
    return divides and top[0] == bottom[0] == "number" and 0 < top[1] < bottom[1]
