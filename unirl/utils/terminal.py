"""Text on standard output."""

import os
import sys


def print_text(text: str) -> None:
    """Print a long text; that its reader has read enough (`... --help | head`) is no error."""
    try:
        print(text.rstrip("\n"), flush=True)
    except BrokenPipeError:  # Python's own flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
