"""Prompt datasets and the order in which prompts are drawn."""

from unirl.data.load import load_prompts
from unirl.data.prompts import BadLine, LoadReport, Prompt, PromptDataset
from unirl.data.sampler import PromptSampler

__all__ = ["BadLine", "LoadReport", "Prompt", "PromptDataset", "PromptSampler", "load_prompts"]
