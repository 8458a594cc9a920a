"""How a config key is declared: its default, its one-line doc and the rule its value must follow, in one place."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, field
from typing import Any


def key(
    default: Any = MISSING,
    doc: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    choices: Sequence[Any] | None = None,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
) -> Any:
    """A dataclass field for a config key; `default` is left out (mandatory key) or replaced by `factory`.

    The rules (`choices`, and the bounds `gt` >, `ge` >=, `lt` <, `le` <=) are checked by `unirl.config`, which names
    the key, the value found and what was expected; None is outside all rules where the key's type allows it.
    """
    rules = {"choices": choices, "gt": gt, "ge": ge, "lt": lt, "le": le}
    metadata = {"doc": doc, **{name: rule for name, rule in rules.items() if rule is not None}}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)
