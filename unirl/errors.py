"""Errors that the program explains rather than crashes with."""


class UserError(Exception):
    """An error that is the user's to mend: printed in one line, without a traceback."""


class ConfigError(UserError):
    """A config that cannot be run. `problems` holds one line for each thing that is wrong with it."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems
