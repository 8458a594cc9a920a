"""Processes of a run: where they are placed, how they are driven, and what happens when one is lost."""
