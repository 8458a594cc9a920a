"""Layouts of ranks as they are written on the command line: `tp=2+cp=2+sp`."""

import math
from dataclasses import dataclass, replace

from unirl.config.catalog import nearest
from unirl.config.schema import ParallelConfig
from unirl.errors import UserError

SIZES = ("tp", "pp", "vpp", "cp", "ep", "dp")
SWITCHES = {
    "sp": "sequence_parallel",
    "distributed": "use_distributed_optimizer",
    "overlap": "overlap_grad_reduce",
}
DEFAULT = (
    "tp=2,tp=2+sp,pp=2,pp=2+vpp=2,cp=2,dp=2,dp=2+distributed,ep=2,"
    "tp=4,cp=4,tp=2+pp=2,tp=2+cp=2+sp,pp=2+dp=2+distributed"
)


@dataclass(frozen=True, eq=False)
class Layout:
    """name: as it was written, each once in a list; num_ranks: tp * pp * cp * dp."""

    name: str
    parallel: ParallelConfig
    num_ranks: int


def parse_layouts(text: str, base: ParallelConfig | None = None) -> list[Layout]:
    """The layouts of a comma-separated list, each once; `base` has the keys that no layout names.

    Raises UserError for what is none, with the nearest that is known.
    """
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UserError(f"--layouts={text}: names no layout; the default is {DEFAULT}")
    return [_parse_layout(name, base or ParallelConfig()) for name in names]


def _parse_layout(name: str, base: ParallelConfig) -> Layout:
    sizes, switches = {}, {}
    for word in name.split("+"):
        key, equals, value = word.strip().partition("=")
        if equals and key in SIZES:
            sizes[key] = _read_size(name, key, value)
        elif not equals and key in SWITCHES:
            switches[SWITCHES[key]] = True
        else:
            known = [*(f"{size}=2" for size in SIZES), *SWITCHES]
            raise UserError(
                f"--layouts: {word.strip()!r} in {name!r} is unknown; the nearest is {nearest(word.strip(), known)} "
                f"(sizes: {', '.join(SIZES)}; switches: {', '.join(SWITCHES)})"
            )
    replica = math.prod(sizes.get(key, 1) for key in ("tp", "pp", "cp"))
    dp = sizes.pop("dp", None) or _fewest_replicas(sizes)
    stage = sizes.get("tp", 1) * sizes.get("cp", 1) * dp
    if stage % sizes.get("ep", 1):
        raise UserError(f"--layouts: ep={sizes['ep']} in {name!r} does not divide tp*cp*dp = {stage}")
    empty = {"tp": 1, "pp": 1, "vpp": None, "cp": 1, "ep": 1, "sequence_parallel": False}
    return Layout(name, replace(base, **(empty | sizes | switches)), replica * dp)


def _fewest_replicas(sizes: dict[str, int]) -> int:
    """Of which the ranks of a stage, tp * cp * dp, are a multiple of ep."""
    ep = sizes.get("ep", 1)
    return ep // math.gcd(ep, sizes.get("tp", 1) * sizes.get("cp", 1))


def _read_size(name: str, key: str, value: str) -> int:
    least = 2 if key == "vpp" else 1
    if not value.isdecimal() or int(value) < least:
        raise UserError(f"--layouts: found {key}={value} in {name!r}, expected a whole number from {least}")
    return int(value)
