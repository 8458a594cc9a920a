"""What the controller costs: an iteration of calls to workers that only sleep, on a real Ray, at several sizes.

    python -m benchmarks.controller --workers=8,16,32,64
    python -m benchmarks.controller --workers=64,256,1024 --per-process=32 --json=benchmarks/results/controller.json

An iteration is what a training iteration asks of the workers: log-probs, one forward and backward pass, one optimizer
step and the weights in buckets. Every data-parallel index gets its share of 512 samples of 4,096 tokens. The overhead
is the time of the iteration less the time for which the workers sleep, of an iteration of 60 s; the CPU time is that of
the controller's process, which other load on the machine does not change much. Here the workers share the machine with
the controller, so that the overhead holds their CPU time, too.

With `--per-process` one process stands for so many workers: each has its calls, references, copies and heartbeats in
the controller as if it were alone, but fewer connections are held, and a machine of 24 GB has room for 1,024.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from unirl.cluster.calls import Call
from unirl.cluster.crew import Crew
from unirl.cluster.layout import RankGrid
from unirl.cluster.seat import Seated
from unirl.cluster.supervised import ClusterOptions, SupervisedGroup

SLEEP_S = 0.5
ITERATION_S = 60.0
TOKENS = 512 * 4096
BYTES_PER_TOKEN = 8 * 5 + 4 * 4 + 1
"""Of a micro-batch: five int64, four float32 and a mask for each token."""
BUCKETS = 4
COLUMNS = ("workers", "processes", "start_s", "overhead_s", "overhead_percent", "cpu_s", "cpu_percent", "heartbeat_s")


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
        return [], bucket.index < BUCKETS - 1

    def capture(self, model: str) -> dict[str, np.ndarray]:
        return {"weights": np.zeros(2**18, np.float32)}


class SharedProcesses(Crew):
    """A crew of which every `per_process` workers are one process, with a thread for each."""

    def __init__(self, *arguments: Any, per_process: int, **options: Any):
        self._per_process = per_process
        self._hired = 0
        super().__init__(*arguments, **options)

    def _hire(self, bundle: int) -> Any:
        self._hired += 1
        if self._hired % self._per_process == 1 % self._per_process:
            self._newest = super()._hire(bundle, max_concurrency=self._per_process)
        return self._newest


def measure(num_workers: int, iterations: int, per_process: int) -> dict[str, float]:
    """Start that many workers and time iterations; seconds."""
    with tempfile.TemporaryDirectory() as folder:
        options = ClusterOptions(None, (num_workers,), 600, 120, 1, 1.0, Path(folder))
        crew = partial(SharedProcesses, per_process=per_process)
        grid = RankGrid(dp=num_workers)
        started = time.perf_counter()
        group = SupervisedGroup(dict, grid, options, lambda line: None, worker=Sleeper, crew=crew)
        ready = time.perf_counter()
        try:
            shares = tuple(np.zeros(TOKENS // num_workers * BYTES_PER_TOKEN, np.uint8) for _ in range(num_workers))
            iteration_s, cpu_s = timed(partial(iterate, group, shares), iterations)
            heartbeat_s, _ = timed(lambda: group._crew.silent(range(num_workers)), iterations)
        finally:
            group.close()
    overhead = iteration_s - 3 * SLEEP_S
    return {
        "workers": num_workers,
        "processes": -(-num_workers // per_process),
        "start_s": round(ready - started, 2),
        "overhead_s": round(overhead, 3),
        "overhead_percent": round(100 * overhead / ITERATION_S, 2),
        "cpu_s": round(cpu_s, 3),
        "cpu_percent": round(100 * cpu_s / ITERATION_S, 2),
        "heartbeat_s": round(heartbeat_s, 3),
    }


def iterate(group: SupervisedGroup, shares: tuple[np.ndarray, ...]) -> None:
    """What an iteration asks of the workers."""
    group.run(Call("actor", "log_probs", (), shares, answers="reporting"))
    group.run(Call("actor", "forward_backward", ("loss",), shares, answers="reporting", effect="gradients"))
    group.run(Call("actor", "optimizer_step", answers="all", effect="weights"))
    list(group.stream("actor", "export_weights", 2**28))


def timed(action: Callable[[], Any], times: int) -> tuple[float, float]:
    """Medians of the seconds and of this process's CPU seconds."""
    seconds, cpu_seconds = [], []
    for _ in range(times):
        begun, cpu_begun = time.perf_counter(), time.process_time()
        action()
        seconds.append(time.perf_counter() - begun)
        cpu_seconds.append(time.process_time() - cpu_begun)
    return statistics.median(seconds), statistics.median(cpu_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,16,32,64")
    parser.add_argument("--per-process", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(" ".join(f"{name:>16}" for name in COLUMNS))
    for num_workers in map(int, options.workers.split(",")):
        rows.append(measure(num_workers, options.iterations, options.per_process))
        print(" ".join(f"{rows[-1][name]:>16}" for name in COLUMNS), flush=True)
    if options.json:
        report = {"cpus": os.cpu_count(), "load_average": os.getloadavg()[0], "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
