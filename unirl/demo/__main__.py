"""`python -m unirl.demo [--seed N] [--llm] [key=value ...]`: train a model on this machine and show what it learnt."""

import argparse
import itertools
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from unirl import train_ar
from unirl.config import compose
from unirl.config.schema import TrainConfig
from unirl.demo.record import read_run
from unirl.demo.show import show_run
from unirl.errors import UserError


@dataclass(frozen=True)
class Demo:
    """A recipe, where its runs go, and what is said before and after it."""

    recipe: str
    run_dir: str
    before: str
    after: str


TINY = Demo(
    recipe="ar/arith_drpo_tiny_cpu",
    run_dir="runs/demo",
    before="""\
A language model of 120 thousand parameters will learn to show its work on sums such as 4 + 3 - 2.
  1. The base model is made, once: it first learns from careful demonstrations ("4+3=7, 7-2=5. \\boxed{5}"),
     then from a lazy tutor who mostly guesses a number. It ends up guessing.
  2. Reinforcement learning: it answers problems, each several times; answers that reasoning-gym's verifier finds right
     become likelier. Nobody tells the model to work step by step.
  3. Before and after, it is examined on problems that neither the tutors nor training ever showed.""",
    after="""\
What was learnt: showing its work pays. The careful skill was there from the demonstrations and had become rare; the
reward brought it back and polished it. A model this small hardly learns more than that.""",
)

LLM = Demo(
    recipe="ar/smollm2_135m_chain_sum_cpu",
    run_dir="runs/demo-llm",
    before="""\
A pretrained language model (SmolLM2-135M-Instruct) will learn to answer sums such as 4 + 3 in \\boxed{}.
  1. The model is read from the Python package that carries it and written as a Hugging Face folder, once.
  2. Reinforcement learning: it answers problems, each several times; answers that reasoning-gym's verifier finds right
     become likelier. This takes about eight minutes on two cores.
  3. Before and after, it is examined on problems that training never showed.""",
    after="""\
What was learnt: to put into the box the sum that it knows from its pretraining, where it used to put any number.""",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a demo; returns the exit code of the training command that it runs."""
    parser = argparse.ArgumentParser(prog="python -m unirl.demo", description=__doc__.partition(": ")[2])
    parser.add_argument("--seed", type=int, help="seed of the sampling (default: the recipe's)")
    parser.add_argument("--llm", action="store_true", help="train a pretrained model of 135M parameters instead")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys, as for unirl.train_ar")
    options = parser.parse_intermixed_args(argv)
    demo = LLM if options.llm else TINY
    overrides = list(options.overrides)
    if options.seed is not None:
        overrides.append(f"seed={options.seed}")
    if not any(is_set(override, "run_dir") for override in overrides):
        overrides.append(f"run_dir={unused(demo.run_dir)}")
    try:
        config = compose(demo.recipe, overrides)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return train_ar.EXIT_USER_ERROR
    return run(demo, config, overrides)


def is_set(override: str, key: str) -> bool:
    """Whether an override on the command line sets `key`."""
    return override.partition("=")[0].lstrip("+") == key


def unused(prefix: str) -> str:
    """The first of PREFIX-1, PREFIX-2, ... that does not exist."""
    return next(path for number in itertools.count(1) if not Path(path := f"{prefix}-{number}").exists())


def run(demo: Demo, config: TrainConfig, overrides: Sequence[str]) -> int:
    """Say what will happen, train with the user's own command, show the result."""
    console = Console(highlight=False, soft_wrap=True)
    command = [f"--config-name={demo.recipe}", *overrides]
    console.print(demo.before, markup=False)
    console.print(f"\nThe command is: {python()} -m unirl.train_ar {shlex.join(command)}\n", markup=False)
    started = time.perf_counter()
    code = train_ar.main(command)
    if code != 0:
        return code
    console.print()
    show_run(read_run(config.run_dir), console)
    console.print(demo.after, markup=False)
    console.print(f"\nTotal time: {time.perf_counter() - started:.0f} s")
    console.print(next_steps(demo, config, overrides), markup=False)
    return 0


def next_steps(demo: Demo, config: TrainConfig, overrides: Sequence[str]) -> str:
    """Where the run lies and commands to try."""
    this_demo = f"{python()} -m unirl.demo{' --llm' if demo is LLM else ''}"
    kept = [text for text in overrides if not any(is_set(text, key) for key in ("run_dir", "num_iterations", "resume"))]
    longer = [*kept, f"run_dir={config.run_dir}", f"num_iterations={2 * config.num_iterations}", "resume=auto"]
    steps = [
        ("another algorithm by one key", f"{this_demo} algorithm=grpo"),
        ("another seed", f"{this_demo} --seed {config.seed + 1}"),
        ("go on with this run", f"{this_demo} {shlex.join(longer)}"),
        ("all recipes and keys", f"{python()} -m unirl.train_ar --help"),
    ]
    if demo is TINY:
        steps.append(("a real language model", "make demo-llm"))
    width = max(len(what) for what, _ in steps)
    lines = [f"  {what:<{width}}   {command}" for what, command in steps]
    return (
        f"The run is in {config.run_dir}: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/, and policy/, the "
        "trained\nmodel as a Hugging Face folder.\n\nTry next:\n" + "\n".join(lines)
    )


def python() -> str:
    """How this Python is called from here."""
    if shutil.which("python") == sys.executable:
        return "python"
    executable = Path(sys.executable)
    here = Path.cwd()
    return str(executable.relative_to(here)) if executable.is_relative_to(here) else str(executable)


if __name__ == "__main__":
    sys.exit(main())
