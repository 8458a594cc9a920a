"""What the controller costs: an iteration of calls to workers that only sleep, on a real Ray, at several sizes.

    python -m benchmarks.controller --workers=8,16,32,64 --json=benchmarks/results/controller.json

An iteration is what a training iteration asks of the workers: log-probs, one forward and backward pass, one optimizer
step and the weights in buckets. Every data-parallel index gets its share of 512 samples of 4,096 tokens. The overhead
is the time of the iteration less the time for which the workers sleep, of an iteration of 60 s; the CPU time is that of
the controller's process, which other load on the machine does not change much.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from unirl.cluster.seat import Seated

SLEEP_S = 0.5
ITERATION_S = 60.0
TOKENS = 512 * 4096
BYTES_PER_TOKEN = 8 * 5 + 4 * 4 + 1
"""Of a micro-batch: five int64, four float32 and a mask for each token."""
CALLS = ("log_probs", "forward_backward", "optimizer_step")


class Sleeper(Seated):
    """Takes what a worker takes and sleeps instead; without torch, so that many fit on one machine."""

    def __init__(self, bundle: int, *arguments: Any):
        super().__init__(bundle)

    def start(self, rank: int, world_size: int, meeting: Any) -> dict[str, Any]:
        return {"actor": SimpleNamespace(replicated=True)}

    def call(self, call: Any, share: Any = None) -> Any:
        time.sleep(SLEEP_S)
        if not call.answers:
            return None
        if call.method == "log_probs":
            return [np.zeros((2, len(share) // BYTES_PER_TOKEN), np.float32)]
        return [{f"metric_{number}": 1.0 for number in range(30)}]

    def next_bucket(self, bucket: Any, answers: bool) -> tuple[list, bool]:
        return [], bucket.index < 3

    def capture(self, model: str) -> dict[str, np.ndarray]:
        return {"weights": np.zeros(2**18, np.float32)}


def measure(num_workers: int, iterations: int) -> dict[str, float]:
    """Start that many workers and time iterations; seconds."""
    from unirl.cluster.calls import Call
    from unirl.cluster.layout import RankGrid
    from unirl.cluster.supervised import ClusterOptions, SupervisedGroup

    with tempfile.TemporaryDirectory() as folder:
        options = ClusterOptions(None, (num_workers,), 600, 120, 1, 1.0, Path(folder))
        started = time.perf_counter()
        group = SupervisedGroup(dict, RankGrid(dp=num_workers), options, lambda line: None, worker=Sleeper)
        ready = time.perf_counter()
        shares = tuple(np.zeros(TOKENS // num_workers * BYTES_PER_TOKEN, np.uint8) for _ in range(num_workers))
        seconds, cpu_seconds = [], []
        for _ in range(iterations):
            begun, cpu_begun = time.perf_counter(), time.process_time()
            group.run(Call("actor", "log_probs", (), shares, answers="reporting"))
            group.run(Call("actor", "forward_backward", ("loss",), shares, answers="reporting", effect="gradients"))
            group.run(Call("actor", "optimizer_step", answers="all", effect="weights"))
            list(group.stream("actor", "export_weights", 2**28))
            seconds.append(time.perf_counter() - begun)
            cpu_seconds.append(time.process_time() - cpu_begun)
        group.close()
    overhead = statistics.median(seconds) - len(CALLS) * SLEEP_S
    return {
        "workers": num_workers,
        "start_s": round(ready - started, 2),
        "overhead_s": round(overhead, 3),
        "overhead_percent": round(100 * overhead / ITERATION_S, 2),
        "controller_cpu_s": round(statistics.median(cpu_seconds), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,16,32,64")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'workers':>8} {'start s':>8} {'overhead s':>11} {'% of 60 s':>10} {'CPU s':>8}")
    for num_workers in map(int, options.workers.split(",")):
        row = measure(num_workers, options.iterations)
        rows.append(row)
        print("{:>8} {:>8} {:>11} {:>10} {:>8}".format(*row.values()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
