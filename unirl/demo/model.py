"""The architecture of the demos' models, and how they are trained on one core."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 model of 120 thousand parameters with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        initializer_range=0.04,  # twice the usual: a small model starts to learn sooner
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from more threads, and the number of threads changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
