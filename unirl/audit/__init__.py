"""Checks of the numbers that users run on their own machine: `python -m unirl.audit --help`."""
