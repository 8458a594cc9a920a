"""`python -m unirl.launch slurm|local --config-name=RECIPE [key=value ...] [--print]`."""

import shutil
import subprocess
import sys
from collections.abc import Sequence

from unirl.config.compose import compose
from unirl.config.rules import run_problems
from unirl.errors import UserError
from unirl.launch.command import USAGE, parse_launch
from unirl.launch.plan import Plan, make_plan, merged_environment
from unirl.utils.terminal import print_text

EXIT_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of what was run, 0 after --print, 2 on an error that is the user's to mend."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print_text(USAGE)
        return 0
    try:
        return _launch(argv)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_USER_ERROR


def _launch(argv: Sequence[str]) -> int:
    launch = parse_launch(argv)
    training = launch.training
    config = compose(training.config_name, training.overrides, training.config_dirs, training.purpose)
    plan = make_plan(launch, config)
    if not launch.print_only:
        return _run(plan)
    refusals = [f"# a run is refused: {problem}" for problem in run_problems(config)]
    print_text("\n".join([*refusals, plan.text()]))
    return 0


def _run(plan: Plan) -> int:
    if shutil.which(plan.command[0]) is None:
        raise UserError(f"{plan.command[0]} is not on PATH: is this a login node of a Slurm cluster? --print shows all")
    return subprocess.run(plan.command, env=merged_environment(plan), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
