"""The command line of the launcher: where to run, options of its own, and the rest for training and for sbatch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unirl.config.catalog import nearest
from unirl.config.command import Command, parse
from unirl.errors import UserError

USAGE = """\
usage: python -m unirl.launch slurm|local --config-name=RECIPE [key=value ...] [--print] [options]

  slurm                 submit a job script of examples/slurm with as many nodes as the config needs
  local                 train on this machine
  --config-name=RECIPE, --config-dir=FOLDER, key=value
                        as for python -m unirl.train_ar; they are checked before anything is submitted
  --print               show what would run, and run nothing
  --template=NAME       the job script (slurm): train_ar, train_ar_single_node, train_ar_requeue,
                        train_ar_separate_rollout or train_ar_heterogeneous; by default what the config asks for
  --OPTION=VALUE        any other option is sbatch's own (slurm): --partition=gpu --account=me --time=12:00:00"""

PLACES = ("slurm", "local")
TEMPLATES = (
    "train_ar",
    "train_ar_single_node",
    "train_ar_requeue",
    "train_ar_separate_rollout",
    "train_ar_heterogeneous",
)
_TRAINING_OPTIONS = ("--config-name", "--config-dir")


@dataclass(frozen=True)
class Launch:
    """A parsed command line. `template` is None where the config decides; `sbatch_options` are handed on unread."""

    place: str
    training: Command
    print_only: bool
    template: str | None
    sbatch_options: tuple[str, ...]


def parse_launch(argv: Sequence[str]) -> Launch:
    """Raises UserError on a place or template that does not exist, and on options that the place has no use for."""
    place, *rest = argv or [""]
    if place not in PLACES:
        raise UserError(f"found {place!r}, expected slurm or local ({USAGE.splitlines()[0]})")
    training: list[str] = []
    sbatch_options: list[str] = []
    template, print_only = None, False
    arguments = iter(rest)
    for argument in arguments:
        name, _, value = argument.partition("=")
        if argument == "--print":
            print_only = True
        elif name == "--template":
            template = _check_template(value)
        elif name in _TRAINING_OPTIONS:
            training.append(argument if value else f"{name}={next(arguments, '')}")
        elif argument.startswith("-"):
            sbatch_options.append(_check_sbatch_option(argument))
        else:
            training.append(argument)
    if place == "local" and (template or sbatch_options):
        raise UserError(f"local takes no option {(sbatch_options or ['--template'])[0]}: it starts no job")
    command = parse(training)
    # While it is only shown, what this machine lacks to run it is no error.
    return Launch(
        place, replace(command, purpose="plan" if print_only else "run"), print_only, template, tuple(sbatch_options)
    )


def _check_template(name: str) -> str:
    if name in TEMPLATES:
        return name
    raise UserError(f"--template={name}: no such job script; the nearest is {nearest(name, TEMPLATES)}")


def _check_sbatch_option(text: str) -> str:
    # sbatch takes `--partition gpu` as well, but which word belongs to an option only sbatch knows.
    if text.startswith("--"):
        return text
    raise UserError(f"found {text!r}; options of sbatch are written out here: --partition=gpu rather than -p gpu")
