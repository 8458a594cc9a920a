"""Scorers that need nothing but this machine. None of them imports torch."""
