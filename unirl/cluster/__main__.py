"""`python -m unirl.cluster list|add|remove|serve --run-dir DIR`: the SGLang servers of a running job."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unirl.cluster.runs import find_run
from unirl.errors import UserError
from unirl.observe.pool_folder import Presence, Request
from unirl.utils.terminal import print_text

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
API_KEY_VARIABLE = "UNIRL_SGLANG_API_KEY"
_ANSWER_LIMIT_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own). Returns the exit code: 0, 2 on an error that is the user's to
    mend, 130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except PermissionError as error:
        print(
            f"error: {error.filename}: {error.strerror}; only the user who started the run may see its pool",
            file=sys.stderr,
        )
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("stopped; what the run was asked for it goes on with: see `list`", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _list(options: argparse.Namespace) -> None:
    _, presence = find_run(options.run_dir)
    if options.json:
        run = {"host": presence.host, "pid": presence.pid, "servers": presence.servers}
        print_text(json.dumps(run, indent=2))
    else:
        Console(highlight=False).print(_table(presence))


def _table(presence: Presence) -> Table:
    table = Table(title=f"servers of the run in process {presence.pid} on {presence.host}", title_justify="left")
    for heading in ("name", "where", "origin", "state"):
        table.add_column(heading, overflow="fold")
    for heading in ("samples", "weights", "restarts"):
        table.add_column(heading, justify="right")
    for server in presence.servers:
        version = server["weight_version"]
        table.add_row(
            server["name"],
            server["url"] or "-",
            "launched" if server["launched"] else "attached",
            server["state"],
            str(server["samples"]),
            "-" if version is None else str(version),
            str(server["restarts"]),
        )
    return table


def _add(options: argparse.Namespace) -> None:
    api_key = os.environ.get(API_KEY_VARIABLE)
    if options.api_key_file is not None:
        try:
            api_key = options.api_key_file.read_text().strip()
        except OSError as error:
            raise UserError(f"--api-key-file={options.api_key_file} cannot be read: {error.strerror}") from error
    _ask(options.run_dir, "add", {"url": options.url, "api_key": api_key}, options.timeout_s)


def _remove(options: argparse.Namespace) -> None:
    limit_s = options.limit_s
    _ask(options.run_dir, "remove", {"server": options.server, "limit_s": limit_s}, limit_s + _ANSWER_LIMIT_S)


def _ask(run_dir: Path, action: str, arguments: dict, timeout_s: float) -> None:
    folder, presence = find_run(run_dir)
    request = Request(presence.run_id, action, arguments)
    print_text(asyncio.run(folder.ask(request, timeout_s=timeout_s)))


def _serve(options: argparse.Namespace) -> None:
    from unirl.cluster.serve import ServeOptions, serve  # loads torch, which the other commands do without

    served = ServeOptions(options.run_dir, options.host, options.limit_s, options.wait_s)
    asyncio.run(serve(served, lambda text: print(text, flush=True)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m unirl.cluster",
        description="Show and change the SGLang servers of a running job (rollout.engine=sglang), from any machine "
        "that sees its run_dir, as the user who started it. No sample is lost or drawn twice.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    listing = _command(commands, "list", _list, "show the servers, what they do and which weights they have")
    listing.add_argument("--json", action="store_true", help="as JSON, for programs")

    adding = _command(commands, "add", _add, "have the run use one more server, which runs already")
    adding.add_argument(
        "--url", required=True, help="of the server, as the run's machine reaches it: http://node7:30000"
    )
    adding.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the server's API key; without it the key is that of ${API_KEY_VARIABLE}, if set",
    )
    adding.add_argument(
        "--timeout-s",
        type=_seconds,
        default=3600.0,
        metavar="S",
        help="how long to wait for it to take samples (default: 3600); the run tries on after that",
    )

    removing = _command(commands, "remove", _remove, "have the run do without a server")
    removing.add_argument("server", metavar="NAME_OR_URL", help="as `list` shows it")
    _add_limit(removing)

    serving = _command(
        commands,
        "serve",
        _serve,
        "launch a server here with the run's own options, and have the run use it until SIGTERM, SIGUSR1 or Ctrl-C",
    )
    serving.add_argument(
        "--host", metavar="ADDRESS", help="address of this machine for the run to reach it; default: found by itself"
    )
    _add_limit(serving)
    serving.add_argument(
        "--wait-s",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="how long to wait for a run, at the start and when one has ended: it may be resumed (default: 600)",
    )
    return parser


def _command(commands, name: str, function, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="run_dir of the run")
    command.set_defaults(command=function)
    return command


def _add_limit(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--limit-s",
        type=_seconds,
        default=240.0,
        metavar="S",
        help="how long its samples may take to finish before they go on elsewhere (default: 240)",
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
