"""The vocabulary split over ranks on one machine: `token_logprob` with one collective against torch with three or four.

    python -m benchmarks.kernels.vocab_parallel --ranks 2 --output benchmarks/results/kernels_cpu_tp2.json

Each rank is a process with one thread, over gloo; times are those of the slowest rank.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.kernels.candidates import ENTROPY_COEF, Batch
from benchmarks.kernels.measure import Measurement, measure
from unirl.kernels import token_logprob

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(options, folder), nprocs=options.ranks)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
    rows = [_slowest(cases) for cases in zip(*ranks, strict=True)]
    _print(options, rows)
    if options.output:
        report = {"torch": torch.__version__, "ranks": options.ranks, "vocab": options.vocab, "results": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.vocab_parallel", description="Ranks on this CPU."
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes, which share the vocabulary (default 2)")
    parser.add_argument("--rows", type=int, nargs="+", default=[512], help="tokens T (default 512)")
    parser.add_argument("--vocab", type=int, default=151_936, help="whole vocabulary, a multiple of the ranks")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the logits")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each candidate (default 5)")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    if options.vocab % options.ranks:
        parser.error(f"--vocab {options.vocab} is no multiple of --ranks {options.ranks}")
    return options


def eager_log_probs(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """What one writes in torch over shards: all-reduces of maximum, sum, target and, for the entropy, sum of p z."""
    first = dist.get_rank() * logits.shape[1]
    peak = logits.detach().amax(1).float()
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    z = logits.float() - peak[:, None]
    e = z.exp()
    total = _Summed.apply(e.sum(1))
    column = targets - first
    owned = (column >= 0) & (column < logits.shape[1])
    own = z.gather(1, torch.where(owned, column, 0)[:, None])[:, 0]
    logp = _Summed.apply(torch.where(owned, own, 0.0)) - total.log()
    return logp, total.log() - _Summed.apply((e * z).sum(1)) / total if with_entropy else None


class _Summed(torch.autograd.Function):
    """All-reduce; every rank goes on with the same numbers, so each has the whole gradient already."""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def _kernel(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    return token_logprob(logits, targets, with_entropy=with_entropy, group=dist.group.WORLD)


CANDIDATES = {"eager": eager_log_probs, "cpu": _kernel}


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ranks)
    found = []
    for tokens in options.rows:
        for dtype in options.dtypes:
            width = options.vocab // options.ranks
            generator = torch.Generator().manual_seed(rank)
            source = torch.randn(tokens, width, generator=generator).mul_(3).to(DTYPES[dtype])
            batch = Batch.random(tokens, options.vocab, DTYPES[dtype], with_head=False)
            _check_equal(source[:8], batch.targets[:8])
            for with_entropy in (False, True):
                for name, log_probs in CANDIDATES.items():
                    dist.barrier()
                    took = measure(_summed(log_probs), source, batch, with_entropy, options.repeats)
                    case = {"rows": tokens, "dtype": dtype, "with_entropy": with_entropy, "candidate": name}
                    found.append(case | _rounded(took))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _check_equal(logits: Tensor, targets: Tensor) -> None:
    """Or the times would mean nothing."""
    results = []
    for log_probs in CANDIDATES.values():
        leaf = logits.clone().requires_grad_()
        logp, entropy = log_probs(leaf, targets, True)
        (logp + entropy).sum().backward()
        results.append((logp, entropy, leaf.grad))
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(eager, ours, rtol=2e-2 if logits.dtype == torch.bfloat16 else 1e-4, atol=1e-5)


def _summed(log_probs: Callable) -> Callable[[Tensor, Batch, bool], Tensor]:
    def run(logits: Tensor, batch: Batch, with_entropy: bool) -> Tensor:
        logp, entropy = log_probs(logits, batch.targets, with_entropy)
        return logp.sum() if entropy is None else logp.sum() + ENTROPY_COEF * entropy.sum()

    return run


def _rounded(took: Measurement) -> dict[str, float]:
    return {"wall_ms": round(took.wall_ms, 1), "cpu_ms": round(took.cpu_ms, 1), "extra_mib": round(took.extra_mib, 1)}


def _slowest(cases: tuple[dict, ...]) -> dict:
    return cases[0] | {key: max(case[key] for case in cases) for key in ("wall_ms", "cpu_ms", "extra_mib")}


def _print(options: argparse.Namespace, rows: list[dict]) -> None:
    table = Table(title=f"forward + backward, V = {options.vocab} over {options.ranks} ranks; of the slowest rank")
    for name in ("T", "dtype", "entropy", "candidate"):
        table.add_column(name)
    for name in ("wall ms", "CPU ms", "extra MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        shown = row | {"with_entropy": "yes" if row["with_entropy"] else "no"}
        table.add_row(*(str(value) for value in shown.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
