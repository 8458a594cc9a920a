"""Benchmarks: each prints a table and can write JSON; run as `python -m benchmarks.<name>`."""
