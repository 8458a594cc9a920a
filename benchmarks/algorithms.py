"""Every algorithm preset on the demo's task: `python -m benchmarks.algorithms [--seeds 0 1] [--presets grpo ...]`.

Trains the recipe ar/arith_drpo_tiny_cpu once per preset and seed, in processes of their own, one after the other, and
prints held-out accuracy before and after as a table. A preset that learns here works; the task is far too small to say
which of two presets is better.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from unirl.demo.record import RunRecord, read_run

RECIPE = "ar/arith_drpo_tiny_cpu"
PRESETS = sorted(path.stem for path in (Path(__file__).parents[1] / "examples" / "algorithm").glob("*.yaml"))
EXTRA = {
    # A value model of this size that starts from a fresh head wants a larger rate than a large one.
    "ppo": ["algorithm.critic.optimizer.lr=1e-3", "stack.num_updates_per_batch=4"],
    # Its rows are the steps of episodes.
    "webrl_const_t10": ["rollout.environment=calculator", "rollout.max_episode_tokens=96", "rollout.rows=step"],
}


ACCURACY = "eval/chain_sum/avg@8"


def train(overrides: list[str], run_dir: str) -> RunRecord:
    arguments = [f"--config-name={RECIPE}", f"run_dir={run_dir}", *overrides]
    subprocess.run([sys.executable, "-m", "unirl.train_ar", *arguments], check=True, stdout=subprocess.DEVNULL)
    return read_run(run_dir)


def row(overrides: list[str], record: RunRecord, seconds: float) -> str:
    before, after = (record.evaluations[end][ACCURACY] for end in (0, -1))
    reward = record.curve("reward/mean")[-1][1]
    return f"| `{' '.join(overrides)}` | {before:.3f} | {after:.3f} | {reward:.3f} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--iterations", type=int, default=50)
    options = parser.parse_args()
    print(f"| overrides | {ACCURACY} before | after | last reward/mean | s |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for preset, seed in itertools.product(options.presets, options.seeds):
            started = time.perf_counter()
            overrides = [f"algorithm={preset}", f"seed={seed}", f"num_iterations={options.iterations}"]
            overrides += EXTRA.get(preset, [])
            record = train(overrides, f"{folder}/{preset}-{seed}")
            print(row(overrides, record, time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    main()
