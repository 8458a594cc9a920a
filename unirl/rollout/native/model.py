"""A decoder-only transformer whose parameters bear the names that Hugging Face gives them."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from unirl.rollout.native import rope
from unirl.rollout.native.config import ModelConfig

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [..., H, D], k [..., H_kv, D], v [..., H_kv, D]) -> attention's output [..., H * D]; may keep k and v."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        width, head_dim, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.head_shape = (-1, head_dim)
        self.q_proj = nn.Linear(width, config.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Callable) -> torch.Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, self.head_shape))
        k = self.k_norm(self.k_proj(x).unflatten(-1, self.head_shape))
        v = self.v_proj(x).unflatten(-1, self.head_shape)
        return self.o_proj(attend(rope.rotate(q, cos, sin), rope.rotate(k, cos, sin), v))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)).mul_(self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Callable) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """Llama, Qwen2 or Qwen3 for inference. How tokens attend to each other is the caller's `attend`.

    `state_dict()` has the names and shapes of the Hugging Face checkpoint; a tied model has no `lm_head.weight`.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.register_buffer("frequencies", rope.inverse_frequencies(config), persistent=False)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """tokens, positions [...] int64 -> hidden states [..., hidden_size] behind the last norm."""
        x = self.model.embed_tokens(tokens)
        cos, sin = (t.to(x.dtype) for t in rope.rotation(positions, self.frequencies))
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, partial(attend, index))
        return self.model.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., hidden_size] -> [..., vocab_size]."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return F.linear(hidden, head.weight)
