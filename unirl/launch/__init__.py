"""Starts a training run, on this machine or by Slurm: `python -m unirl.launch`."""
