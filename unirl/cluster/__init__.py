"""Processes of a run: where they are placed, how they are driven, and what happens when one is lost."""

import os
import sys

if "ray" not in sys.modules:  # Ray reads these when it is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
