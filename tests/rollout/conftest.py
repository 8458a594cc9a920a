"""Small models with random weights, saved as real Hugging Face folders, and what transformers says of their samples."""

from pathlib import Path

import pytest
import torch
import transformers

from unirl.rollout.native import NativeRolloutEngine

VOCAB_SIZE = 97
MAX_POSITIONS = 160

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Wide enough that the distributions are far from uniform.
    "initializer_range": 0.15,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
_FAMILIES = {
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "llama": ("Llama", {"head_dim": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    "llama3": ("Llama", {"head_dim": 16, "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": False}),
}


def build_model(family: str, seed: int = 0) -> transformers.PreTrainedModel:
    name, fields = _FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**_SHAPE, **fields})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # transformers starts norms at 1 and biases at 0, which would hide faults
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, tuple[transformers.PreTrainedModel, Path]]:
    """By family: the transformers model in float32 and the folder that it was saved to."""
    result = {}
    for family in _FAMILIES:
        model, folder = build_model(family), tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        result[family] = (model, folder)
    return result


@pytest.fixture
def engine(models) -> NativeRolloutEngine:
    return NativeRolloutEngine(models["qwen3"][1], max_batch_size=64)


@torch.no_grad()
def reference_log_probs(model, prompt_ids, token_ids, temperature=1.0) -> torch.Tensor:
    """[len(token_ids)]: log-probs that transformers gives the tokens after the prompt."""
    ids = torch.tensor([[*prompt_ids, *token_ids]])
    log_probs = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, -1)
    positions = torch.arange(len(prompt_ids), ids.shape[1])
    return log_probs[positions - 1, ids[0, positions]]
