"""Scorers that the tests name by dotted path; a response says what is to happen."""

import os
import subprocess
import sys
import time
from pathlib import Path

from unirl.errors import UserError


class ActingScorer:
    """Does what the response says, and pays 1.0 where it comes to an end."""

    answer_field = "path"

    def score(self, responses, answers):
        return [
            self._act(*response.split(), path=Path(path)) for response, path in zip(responses, answers, strict=True)
        ]

    def _act(self, action, argument="0", *, path):
        match action:
            case "sleep":
                path.write_text(str(os.getpid()))
                time.sleep(float(argument))
            case "raise":
                raise KeyError("no such thing")
            case "refuse":
                raise UserError("mend this")
            case "die":
                os._exit(3)
            case "die_once":
                if not path.exists():
                    path.touch()
                    os._exit(3)
            case "child":
                path.write_text(str(subprocess.Popen(["sleep", "60"]).pid))
                time.sleep(60)
            case "return":
                return float(argument)
            case "length":
                return len(argument)
            case "imported":
                return float(argument in sys.modules)
        return 1.0


class RecordScorer:
    answer_field = None

    def score(self, responses, answers):
        return [
            float(record["metadata"]["target"] == response) for response, record in zip(responses, answers, strict=True)
        ]


class PlainScorer:
    def score(self, responses, answers):
        return [float(response == answer) for response, answer in zip(responses, answers, strict=True)]


class FailsToStart:
    def __init__(self):
        raise OSError("no model here")

    def score(self, responses, answers):
        raise AssertionError


class EndsAtStart:
    def __init__(self):
        os._exit(3)

    def score(self, responses, answers):
        raise AssertionError


class NoScore:
    pass


not_a_class = 3
