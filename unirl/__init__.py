"""unirl: reinforcement learning for language models, one code path from a laptop to 64 GPUs."""

__version__ = "0.1.0"
