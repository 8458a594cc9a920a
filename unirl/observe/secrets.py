"""Keeps what the environment holds of secrets out of files."""

import os
import re
from collections.abc import Mapping

_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?)$", re.IGNORECASE)

_MIN_LENGTH = 12
"""Shorter values are words, such as `false`, that may stand in a file for other reasons."""


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text with `${oc.env:NAME}`, as a recipe takes it again, for the value of every variable such as HF_TOKEN."""
    for name, value in environment.items():
        if _NAME.search(name) and len(value) >= _MIN_LENGTH:
            text = text.replace(value, f"${{oc.env:{name}}}")
    return text
