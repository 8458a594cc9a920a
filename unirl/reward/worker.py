"""The scorer process: `python -m unirl.reward.worker SCORER CONNECTION_FD LIFELINE_FD`, started by `WorkerProcess`.

It receives chunks, each a list of (response, answer), and answers with messages, each a tuple:
("ready", answer_field) once; for each chunk ("begun",), then for each of its items in order ("graded", reward) or
("failed", message). ("refused", message) at any point is an error that the user must mend.
"""

import fcntl
import math
import os
import signal
import sys
from multiprocessing.connection import Connection

from unirl.errors import UserError
from unirl.reward.scorers import Scorer, load_scorer

MESSAGE_CHARS = 500


def main() -> None:
    name, connection_fd, lifeline_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(lifeline_fd)
    os.set_inheritable(connection_fd, False)
    with Connection(connection_fd) as connection:
        try:
            scorer = load_scorer(name)()
        except UserError as error:
            connection.send(("refused", str(error)))
            return
        except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises is told to the parent
            connection.send(("refused", f"reward.scorer={name}: {_describe(error)}"))
            return
        connection.send(("ready", getattr(scorer, "answer_field", "answer")))
        serve(scorer, connection)


def die_with_parent(lifeline_fd: int) -> None:
    """Have the kernel kill this process and its children once the other end of the lifeline is closed.

    The other end lives in the parent alone, so any death of the parent closes it. A signal from the kernel also ends
    a process that is stopped, or deep in C code, where a watching thread would not run.
    """
    os.set_inheritable(lifeline_fd, False)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgid(0))
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_blocking(lifeline_fd, False)
    try:
        parent_is_gone = os.read(lifeline_fd, 1) == b""
    except BlockingIOError:
        return
    if parent_is_gone:
        sys.exit(1)


def serve(scorer: Scorer, connection: Connection) -> None:
    """Grade chunks until the parent closes the connection."""
    while True:
        try:
            chunk = connection.recv()
        except EOFError:
            return
        connection.send(("begun",))
        for response, answer in chunk:
            connection.send(grade(scorer, response, answer))


def grade(scorer: Scorer, response: str, answer: object) -> tuple[str, object]:
    try:
        (reward,) = map(float, scorer.score([response], [answer]))
    except UserError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - foreign code: counted and shown by the service, never a silent 0
        return "failed", _describe(error)
    if not math.isfinite(reward):
        return "failed", f"the scorer returned {reward}"
    return "graded", reward


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MESSAGE_CHARS]


if __name__ == "__main__":
    main()
