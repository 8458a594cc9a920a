"""The training command: `python -m unirl.train_ar --config-name=ar/RECIPE key=value ...`; `--help` lists it all."""

import sys
from collections.abc import Sequence

from rich.console import Console

from unirl.config.command import Command, help_text, parse
from unirl.config.compose import compose, to_yaml
from unirl.config.schema import TrainConfig
from unirl.config.summary import print_summary
from unirl.errors import UserError
from unirl.trainer.interrupt import StopRequested, StopSignal
from unirl.utils.terminal import print_text

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own). Returns the exit code: 0, 2 on an error that is the user's to
    mend, 130 after Ctrl-C.
    """
    try:
        return _execute(parse(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("stopped at once; what the last checkpoint holds is safe: continue with resume=auto", file=sys.stderr)
        return EXIT_INTERRUPTED


def _execute(command: Command) -> int:
    if command.purpose == "help":
        print_text(help_text(command.config_dirs))
        return 0
    config = compose(command.config_name, command.overrides, command.config_dirs, command.purpose)
    if command.purpose == "print":
        print_text(to_yaml(config))
        return 0
    if command.purpose == "plan":
        print_summary(config, Console(highlight=False, soft_wrap=True))
        return 0
    return _train(config)


def _train(config: TrainConfig) -> int:
    with StopSignal() as stop:
        try:
            with stop.abandonable():
                from unirl.trainer.ar import ARTrainer  # torch, Megatron, transformers: only for a config that is valid

                trainer = ARTrainer(config, to_yaml(config), stop)
        except StopRequested:
            print("stopped before the first iteration; start again with the same command")
            return EXIT_INTERRUPTED
        return trainer.fit()


if __name__ == "__main__":
    sys.exit(main())
