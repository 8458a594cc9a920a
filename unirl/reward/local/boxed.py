r"""Where a response gives its answer: the last balanced `\boxed{...}`."""

import re

_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*|\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)|\\[A-Za-z]+|[A-Za-z]")


def last_boxed(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{...}` or `\fbox{...}` of `text`; None where there is none.

    The last to be closed counts, so the outer one of two nested boxes. A box that is never closed is passed over.
    Without braces the number, command or letter that follows is the content (`\boxed 5`). Braces may nest; escaped
    ones (`\{`) do not count. Linear in the length of the text.
    """
    content = None
    open_braces: list[int | None] = []  # Where the content begins, for the brace of a box; None for other braces.
    box_end = -1  # Where the last box command ended.
    for token in _TOKEN.finditer(text):
        symbol = token.group()
        if symbol == "{":
            open_braces.append(token.end() if token.start() == box_end else None)
        elif symbol == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                content = text[start : token.start()]
        elif symbol.startswith(("\\boxed", "\\fbox")):
            box_end = token.end()
            if bare := _BARE.match(text, box_end):
                content = bare.group().rstrip(",")
    return content
