"""The command `python -m unirl.audit`: one subcommand for each audit."""

import argparse
import sys

from unirl.audit import kernels, rollout, vectors
from unirl.errors import UserError

AUDITS = (kernels, rollout, vectors)
"""Modules with `add_parser(subparsers)`; their parsers set `run`: from arguments to exit code."""


def main(arguments: list[str] | None = None) -> int:
    """Run the audit that the command line names; returns the exit code: 0 passed, 1 failed, 2 could not run."""
    parser = argparse.ArgumentParser(prog="python -m unirl.audit", description="Check this installation's numbers.")
    subparsers = parser.add_subparsers(required=True, metavar="AUDIT")
    for audit in AUDITS:
        audit.add_parser(subparsers)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
