"""One notation for what LaTeX and plain text write in many ways, and splitting outside brackets."""

import re
from collections.abc import Callable, Iterable

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "，": ",", "；": ";", "％": "%",
        "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "°": r"\degree ",
        "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}", "∅": r"\emptyset ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
        "€": "", "£": "", "¥": "",
    }
)  # fmt: skip

# In order: later rules see what earlier ones left.
_RULES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Line breaks (rows of matrices) stand aside first, so that no rule takes half of one.
        (r"\\\\(?:\[[^\]]*\])?|\\cr(?![A-Za-z])", r"\\newline "),
        (r"\\\$|\$|\\[()\[\]]", " "),
        (r"\\!|(?<=\d)\{,\}(?=\d)", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", " "),
        (r"\\[,;:> ]|~|\\(?:q?quad|displaystyle|textstyle|limits|nolimits|thinspace)(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\operatorname\*?\s*\{\s*([A-Za-z]+)\s*\}", r"\\\1 "),
        (r"\\(?:boxed|fbox|mathbf|boldsymbol|bm|mathit|mathsf|mathnormal|pmb|underline)\s*(?=\{)", ""),
        (r"\\(?:text)?color\s*\{[A-Za-z]+\}|\\(?:bf|it|rm|tiny|small|normalsize|large|Large|huge)(?![A-Za-z])", " "),
        (r"\\(?:textbf|textit|textrm|textnormal|textsf|mathrm|mbox|hbox|emph|text)\s*(?=\{)", r"\\text"),
        (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"<=|\\(?:le|leqslant)(?![A-Za-z])", r"\\leq "),
        (r">=|\\(?:ge|geqslant)(?![A-Za-z])", r"\\geq "),
        (r"!=|\\ne(?![A-Za-z])", r"\\neq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:varnothing|emptyset)(?![A-Za-z])", r"\\emptyset "),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degrees?(?![A-Za-z])", r"\\degree "),
        (r"\\%", "%"),
        (r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|ln|log|exp|infty)(?![A-Za-z])", r"\\\1 "),
        (r"(?<![\\A-Za-z])(?:infinity|inf)(?![A-Za-z])", r"\\infty "),
        (r"_\{(\w)\}(?!\w)", r"_\1"),
        (r"\*\*", "^"),
        (r"\\text\{\s*,?\s*(?:or|and)\s*\}|(?<=[\s\d)}])(?:or|and)(?=[\s\d(\\{$-])", ","),
        (r"(?<![\d.])\d{1,3}(?: \d{3})+(?!\d)", lambda match: match.group().replace(" ", "")),
        (r"\s+", " "),
        # A space that separates two words, two numbers or a command and a letter stays: "12 34" is not 1234.
        (r"(?<![A-Za-z0-9.]) | (?![A-Za-z0-9.])", ""),
    )
]

_OPEN, _CLOSE = frozenset(("(", "[", "{", "\\{")), frozenset((")", "]", "}", "\\}"))
_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)


def clean(text: str) -> str:
    """`text` in one notation: no dollars or spacing commands, one name for each operator, spaces only between words."""
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return strip_outer(re.sub(r"(?<!\.)[.,;:]$", "", text.strip()))


def strip_outer(text: str) -> str:
    """Without spaces, and without braces or a text command around the whole."""
    while True:
        text = text.strip()
        inner = text.removeprefix("\\text")
        if not (inner.startswith("{") and closing(inner, 0) == len(inner) - 1):
            return text
        text = inner[1:-1]


def closing(text: str, start: int) -> int | None:
    """Index of the bracket that closes the one at `start`; any kind closes any kind, as in (1,2]. None: unbalanced."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token.group() in _OPEN) - (token.group() in _CLOSE)
        if depth == 0:
            return token.end() - 1
    return None


def split(text: str, separators: Iterable[str]) -> list[str]:
    """Pieces of `text` between separators that stand outside all brackets."""
    return split_with_separators(text, separators)[0]


def split_with_separators(text: str, separators: Iterable[str]) -> tuple[list[str], list[str]]:
    """The pieces as in `split`, and the separators between them (one fewer)."""
    wanted = frozenset(separators)
    pieces, found, depth, start = [], [], 0, 0
    for token in _TOKEN.finditer(text):
        symbol = token.group()
        depth += (symbol in _OPEN) - (symbol in _CLOSE)
        if depth == 0 and symbol in wanted:
            pieces.append(text[start : token.start()].strip())
            found.append(symbol)
            start = token.end()
    return [*pieces, text[start:].strip()], found
