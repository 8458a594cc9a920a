"""What the names of metrics tell."""

from collections.abc import Iterable, Mapping
from typing import Any

_SPEEDS = ("tokens_per_second", "sync/gb_per_s")


def timeless(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` without what depends on time: equal runs have equal ones."""
    return [
        {name: value for name, value in record.items() if not name.startswith("time/") and name not in _SPEEDS}
        for record in records
    ]
