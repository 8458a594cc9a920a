"""Random kills of a training run: does it end with the weights of an undisturbed one, every prompt used once?

    python -m benchmarks.chaos --iterations=200 --kills=50 --json=benchmarks/results/chaos.json

The same recipe is trained twice with two ranks on Ray: undisturbed, and while this program kills (SIGKILL) or stops
(SIGSTOP) its processes from outside, at moments drawn from `--seed`: ranks, the processes that grade, and the
controller, which is then started anew with resume=auto. Exit code 1 where anything differs at the end.

Faults strike at any time of an iteration, while a checkpoint is written, while weights are synced, or while another
rank is being replaced. What a fault costs is the time from it to the next finished iteration.
"""

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from unirl.observe.metrics import timeless

RECIPE = (
    "--config-name=ar/arith_drpo_tiny_cpu",
    "batch_size=4",
    "sampling.num_samples=4",
    "sampling.max_new_tokens=16",
    "eval.max_prompts=8",
    "eval.num_samples=1",
    "eval.every=0",
    "checkpoint.every=5",
    "reward.num_workers=2",
)
CLUSTER = ("num_devices=2", "cluster.object_store_gb=0.2", "cluster.max_restarts=1000")
WAIT_S = 1800.0
"""How long a run may do nothing before this program gives up on it."""
POLL_S = 0.002
ORPHANS_END_S = 120.0
"""Ray's processes look now and then whether those that they belong to are there."""


@dataclass(frozen=True)
class Fault:
    """What happens to whom, and when: after so many iterations, `fraction` of an iteration later or at a `moment`."""

    target: str
    how: str
    moment: str = "any"
    iteration: int = 0
    rank: int = 0
    fraction: float = 0.0

    @property
    def kind(self) -> str:
        """As in the table."""
        when = {"any": "", "recovery": ", while the other is replaced"}.get(self.moment, f", in a {self.moment}")
        return f"{self.target} {self.how}{when}"


KINDS = (
    (Fault("rank", "killed"),),
    (Fault("rank", "killed", "save"),),
    (Fault("controller", "killed"),),
    (Fault("reward worker", "killed"),),
    (Fault("rank", "stopped"),),
    (Fault("rank", "killed", "sync"),),
    (Fault("rank", "killed"), Fault("rank", "killed", "recovery")),
    (Fault("reward worker", "killed"),),
    (Fault("rank", "stopped", "save"),),
    (Fault("rank", "killed"),),
    (Fault("controller", "killed", "save"),),
)
"""One round of faults; those of one tuple follow each other at once."""


def draw_faults(kills: int, iterations: int, seed: int) -> list[Fault]:
    """Rounds of `KINDS`, in random order, at random moments of the first four fifths of the iterations."""
    generator = random.Random(seed)
    chosen, groups = 0, []
    for group in itertools.cycle(KINDS):
        if chosen == kills:
            break
        groups.append(group[: kills - chosen])
        chosen += len(groups[-1])
    generator.shuffle(groups)
    when = sorted(generator.choices(range(1, iterations * 4 // 5), k=len(groups)))
    faults = []
    for iteration, group in zip(when, groups, strict=True):
        first = generator.randrange(2)
        for number, fault in enumerate(group):
            rank, fraction = (first + number) % 2, generator.random()
            faults.append(replace(fault, iteration=iteration, rank=rank, fraction=fraction))
    return faults


@dataclass
class Strike:
    """A fault that has happened; seconds until the run had finished another iteration."""

    kind: str
    iteration: int
    cost_s: float | None = None


@dataclass
class Run:
    """A training run in processes of its own; `arguments` name its recipe."""

    folder: Path
    arguments: Sequence[str]
    starts: int = 0
    strikes: list[Strike] = field(default_factory=list)
    orphans: list[psutil.Process] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def start(self) -> None:
        """With resume=auto: anew, or where the last one was killed."""
        command = [sys.executable, "-m", "unirl.train_ar", *self.arguments, f"run_dir={self.folder}", "resume=auto"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.starts += 1
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as log:
            self.driver = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def finish(self) -> None:
        """Wait for its end. Raises RuntimeError where that is a failure."""
        self.wait_for(lambda: self.driver.poll() is not None, "its end")
        if self.driver.returncode:
            raise RuntimeError(f"the run ended with exit code {self.driver.returncode}: see {self.log}")

    def left_behind(self) -> list[str]:
        """Processes that outlive their killed controller for long."""
        _, alive = psutil.wait_procs(self.orphans, timeout=ORPHANS_END_S)
        return [process.name() for process in alive]

    def wait_for(self, condition: Callable[[], Any], what: str, pause_s: float = 0.05) -> Any:
        """What `condition` returns once that is true; also when the run has ended. Raises TimeoutError."""
        deadline = time.monotonic() + WAIT_S
        while not (found := condition()) and self.driver.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {WAIT_S:g} s for {what}: see {self.log}")
            time.sleep(pause_s)
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """Of the finished iterations."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [record for record in records if record["iteration"]]

    def stall_reports(self) -> list[Path]:
        return sorted(self.folder.glob("stall-*.txt"))

    def pid_of_rank(self, rank: int) -> int | None:
        """As the run has told last since its start."""
        with open(self.log, "rb") as log:
            log.seek(self._log_start)
            found = re.findall(rf"^rank {rank}: .*; pid (\d+) on".encode(), log.read(), re.MULTILINE)
        return int(found[-1]) if found else None

    def reward_workers(self) -> list[int]:
        children = psutil.Process(self.driver.pid).children()
        return [child.pid for child in children if "unirl.reward.worker" in _command_line(child.pid)]


class Chaos:
    """Lets faults happen to a run; `iteration_s`: how long an undisturbed iteration takes."""

    def __init__(self, run: Run, iteration_s: float):
        self.run = run
        self._iteration_s = iteration_s
        self._reports = 0

    def strike(self, fault: Fault) -> None:
        """Wait for the moment, let the fault happen, and wait until the run has gone on from it."""
        self._await_moment(fault)
        if self.run.driver.poll() is not None:
            self.run.finish()
            raise RuntimeError(f"the run was done before a {fault.kind} could happen: give it more iterations")
        strike = Strike(fault.kind, len(self.run.metrics()))
        self._reports = len(self.run.stall_reports())
        begun = time.monotonic()
        self._hit(fault)
        self.run.strikes.append(strike)
        print(f"after iteration {strike.iteration}: {strike.kind}", flush=True)
        self._begun, self._strike = begun, strike

    def settle(self) -> None:
        """Until another iteration is finished."""
        done = self._strike.iteration
        self.run.wait_for(lambda: len(self.run.metrics()) > done, f"iteration {done + 1}")
        self._strike.cost_s = round(time.monotonic() - self._begun, 2)

    def _await_moment(self, fault: Fault) -> None:
        run = self.run
        if fault.moment == "recovery":
            run.wait_for(lambda: len(run.stall_reports()) > self._reports, "a stall report")
            time.sleep(fault.fraction * 5.0)
            return
        run.wait_for(lambda: len(run.metrics()) >= fault.iteration, f"iteration {fault.iteration}")
        if fault.moment == "save":
            saves = run.folder / "checkpoints"
            run.wait_for(lambda: any(saves.glob(".tmp-*")), "a save", POLL_S)
        elif fault.moment == "sync":
            pid = run.pid_of_rank(fault.rank)
            run.wait_for(lambda: "next_bucket" in _command_line(pid), "a sync", POLL_S)
        else:
            time.sleep(fault.fraction * self._iteration_s)

    def _hit(self, fault: Fault) -> None:
        number = signal.SIGSTOP if fault.how == "stopped" else signal.SIGKILL
        if fault.target == "controller":
            self._kill_controller()
        elif fault.target == "rank":
            _send(self.run.pid_of_rank(fault.rank), number)
        else:
            workers = self.run.reward_workers()
            _send(workers[fault.rank % len(workers)], number)

    def _kill_controller(self) -> None:
        """And start it again, while what it has left is still ending."""
        self.run.orphans += psutil.Process(self.run.driver.pid).children(recursive=True)
        self.run.driver.kill()
        self.run.driver.wait()
        self.run.start()


def train_undisturbed(folder: Path, arguments: Sequence[str]) -> Run:
    """To the end."""
    run = Run(folder, arguments)
    run.start()
    run.finish()
    return run


def train_disturbed(folder: Path, arguments: Sequence[str], faults: Sequence[Fault], iteration_s: float) -> Run:
    """To the end, through all faults."""
    run = Run(folder, arguments)
    run.start()
    try:
        chaos = Chaos(run, iteration_s)
        for fault, following in itertools.zip_longest(faults, faults[1:]):
            chaos.strike(fault)
            if following is None or following.moment != "recovery":
                chaos.settle()
        run.finish()
    finally:
        if run.driver.poll() is None:
            run.driver.terminate()
            run.driver.wait()
    return run


def compare(disturbed: Run, undisturbed: Run, drawn: int) -> dict[str, bool]:
    """What must hold at the end, by its name; drawn: prompts of the whole run."""
    weights = [(run.folder / "policy" / "model.safetensors").read_bytes() for run in (disturbed, undisturbed)]
    samples = [_samples(run.folder) for run in (disturbed, undisturbed)]
    groups = {(sample["iteration"], sample["group_id"]): sample["prompt"] for sample in samples[0]}
    uses, sampler = Counter(groups.values()), _sampler(disturbed.folder)
    return {
        "the weights are bit-identical": weights[0] == weights[1],
        "the metrics of all iterations are equal": timeless(disturbed.metrics()) == timeless(undisturbed.metrics()),
        "the samples of all iterations are equal": samples[0] == samples[1],
        "every prompt was used exactly once": len(groups) == drawn == len(uses) and set(uses.values()) == {1},
        "the sampler counts as many": sampler["epoch"] * sampler["num_prompts"] + sampler["position"] == drawn,
    }


def interrupted_calls(run: Run) -> dict[str, int]:
    """How often workers were lost in which call, as the stall reports tell."""
    first_lines = (path.read_text().partition("\n")[0] for path in run.stall_reports())
    return dict(Counter(re.split(r"[: ]", line)[0] for line in first_lines).most_common())


def run_chaos(
    folder: Path, recipe: Sequence[str], *, iterations: int, kills: int, seed: int, heartbeat_s: float
) -> dict[str, Any]:
    """Train twice in `folder`; what happened and whether it was survived, ready for JSON."""
    faults = draw_faults(kills, iterations, seed)
    values = dict(argument.split("=", 1) for argument in recipe)
    samples = int(values["batch_size"]) * int(values["sampling.num_samples"])
    arguments = [
        *recipe,
        *CLUSTER,
        f"num_iterations={iterations}",
        f"cluster.heartbeat_s={heartbeat_s:g}",
        f"logging.samples_per_iteration={samples}",
        "debug.worst_mismatches=0",
    ]
    begun = time.monotonic()
    undisturbed = train_undisturbed(folder / "undisturbed", arguments)
    undisturbed_s = time.monotonic() - begun
    iteration_s = statistics.median(record["time/iteration"] for record in undisturbed.metrics())
    begun = time.monotonic()
    disturbed = train_disturbed(folder / "disturbed", arguments, faults, iteration_s)
    disturbed_s = time.monotonic() - begun
    left_behind = disturbed.left_behind()
    return {
        "settings": {
            "iterations": iterations,
            "kills": kills,
            "seed": seed,
            "heartbeat_s": heartbeat_s,
            "recipe": [*recipe, *CLUSTER],
            "cpus": os.cpu_count(),
        },
        "undisturbed_s": round(undisturbed_s, 1),
        "disturbed_s": round(disturbed_s, 1),
        "iteration_s": round(iteration_s, 3),
        "replacements": len(disturbed.stall_reports()),
        "interrupted_calls": interrupted_calls(disturbed),
        "controller_starts": disturbed.starts,
        "strikes": [asdict(strike) for strike in disturbed.strikes],
        "left_behind": left_behind,
        "verdict": {
            **compare(disturbed, undisturbed, iterations * int(values["batch_size"])),
            "no process was left behind": not left_behind,
        },
    }


def print_report(report: dict[str, Any]) -> None:
    """The table of faults and what they cost, and the verdict."""
    by_kind: dict[str, list[dict]] = {}
    for strike in report["strikes"]:
        by_kind.setdefault(strike["kind"], []).append(strike)
    print(f"\n{'fault':<46} {'times':>5} {'median s':>9} {'longest s':>10}")
    for kind, strikes in sorted(by_kind.items()):
        costs = [strike["cost_s"] for strike in strikes if strike["cost_s"] is not None]
        shown = f"{statistics.median(costs):>9.1f} {max(costs):>10.1f}" if costs else f"{'(with the next)':>20}"
        print(f"{kind:<46} {len(strikes):>5} {shown}")
    print(f"\nworkers were replaced {report['replacements']} times; calls that were interrupted: ", end="")
    print(", ".join(f"{call} {count}" for call, count in report["interrupted_calls"].items()))
    disturbed = f"{report['disturbed_s']:.0f} s with {len(report['strikes'])} faults"
    print(f"{report['undisturbed_s']:.0f} s undisturbed, {disturbed}")
    for name, holds in report["verdict"].items():
        print(f"{'yes' if holds else 'NO ':<4} {name}")


def _samples(folder: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return [record for record in records if not record.get("eval")]


def _sampler(folder: Path) -> dict[str, int]:
    newest = max((folder / "checkpoints").glob("iteration_*"))
    return json.loads((newest / "state.json").read_text())["sampler"]


def _command_line(pid: int | None) -> str:
    """Of a process, which Ray names after the method that runs; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _send(pid: int, number: signal.Signals) -> None:
    """Nothing where the process has just been replaced: it is gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        print(f"process {pid} was gone already", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heartbeat", type=float, default=10.0, help="cluster.heartbeat_s")
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="for both runs; it must be new")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    report = run_chaos(
        options.folder,
        RECIPE,
        iterations=options.iterations,
        kills=options.kills,
        seed=options.seed,
        heartbeat_s=options.heartbeat,
    )
    print_report(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(report["verdict"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
