"""Errors that the program explains rather than crashes with."""


class UserError(Exception):
    """An error that is the user's to mend: printed in one line, without a traceback."""
