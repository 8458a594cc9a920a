"""What the engine knows of a model without loading it, and the requests that the model can run."""

import json
from pathlib import Path

from unirl.rollout.weights import weight_shapes
from unirl.types import GenerationRequest


class ModelFacts:
    """Read from the Hugging Face folder of the model.

    weights: by Hugging Face name, tensors on the device "meta" of the shapes that an update must have.
    """

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        self.vocab_size: int = config["vocab_size"]
        self.max_positions: int = config["max_position_embeddings"]
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.weights = weight_shapes(folder, tied=config.get("tie_word_embeddings", False))

    def check_request(self, number: int, request: GenerationRequest, max_prompt_tokens: int) -> None:
        """Raises ValueError where a server that takes prompts of `max_prompt_tokens` at most cannot run it.

        A token outside the vocabulary would end the whole server.
        """
        where, params, length = f"request {number}", request.params, len(request.prompt_ids)
        if not 0 < length <= max_prompt_tokens:
            raise ValueError(
                f"{where}: the prompt has {length} tokens; expected at least 1 and at most {max_prompt_tokens}, "
                "which the model's positions and the servers' context length allow"
            )
        for what, ids in (("prompt_ids", request.prompt_ids), ("stop_token_ids", params.stop_token_ids)):
            outside = [token for token in ids if not 0 <= token < self.vocab_size]
            if outside:
                raise ValueError(
                    f"{where}: {what} has {outside[:5]}, outside the vocabulary of {self.vocab_size} tokens"
                )
        if params.max_new_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
            raise ValueError(
                f"{where}: expected max_new_tokens >= 1, temperature >= 0 and 0 < top_p <= 1, found {params}"
            )
        if params.return_support and params.top_k > self.vocab_size:
            raise ValueError(
                f"{where}: found top_k={params.top_k}, more than the vocabulary of {self.vocab_size} tokens"
            )
        if any(seed < 0 for seed in request.seeds):
            raise ValueError(f"{where}: expected seeds >= 0, found {request.seeds}")
