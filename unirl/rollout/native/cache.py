"""Keys and values of the samples that are decoded together."""

import torch
import torch.nn.functional as F

from unirl.rollout.native.config import ModelConfig

_SLOTS_PER_BLOCK = 128


class KVCache:
    """Keys and values of B rows in S used slots, per layer [B * H_kv, capacity, D]; the capacity grows by blocks.

    Prompts stand right-aligned: the last token of every prompt is in the same slot, and so is the n-th generated token
    of every row. A decode step therefore writes one slot for all rows, and only the slots before a short prompt need a
    mask.
    """

    def __init__(self, config: ModelConfig, prompt_lengths: torch.Tensor, max_slots: int, like: torch.Tensor):
        """prompt_lengths [B] int64: prompt tokens of each row; dtype and device are those of `like`.

        The capacity never exceeds `max_slots`, the most slots that will be opened, prompts included.
        """
        self._used = int(prompt_lengths.max())
        self._max_slots = max_slots
        self._num_kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._starts = self._used - prompt_lengths
        self._capacity = min(self._used + _SLOTS_PER_BLOCK, max_slots)
        shape = (len(prompt_lengths) * config.num_kv_heads, self._capacity, config.head_dim)
        # Zeros, since a masked slot still enters a product with probability 0, and 0 * NaN is NaN.
        self._keys = [like.new_zeros(shape) for _ in range(config.num_layers)]
        self._values = [like.new_zeros(shape) for _ in range(config.num_layers)]
        self._mask = self._make_mask()

    def put_prompts(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: torch.Tensor,
        rows: slice,
        prompts: torch.Tensor,
    ) -> None:
        """Store right-padded keys and values [P, T, H_kv, D] of P prompts of `lengths` [P] int64.

        `rows` of the cache hold the prompts `prompts` [rows] int64 (positions in 0..P-1).
        """
        width = keys.shape[1]
        source = (torch.arange(width, device=lengths.device) - (width - lengths[:, None])).clamp(min=0)
        first, last = rows.start * self._num_kv_heads, rows.stop * self._num_kv_heads
        for buffer, padded in ((self._keys[layer], keys), (self._values[layer], values)):
            aligned = padded.gather(1, source[:, :, None, None].expand_as(padded)).transpose(1, 2)
            buffer[first:last, self._used - width : self._used] = aligned[prompts].flatten(0, 1)

    def open_slot(self) -> None:
        """Make room for one more token per row, which `attend` then writes."""
        if self._used == self._capacity:
            self._grow()
        self._used += 1

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k and v [B, H_kv, D] to the newest slot; q [B, H, D] attends to all slots of its row -> [B, H * D].

        The query heads that share a key head are the rows of one matrix product, so keys are read once. For single
        queries on CPU this is faster than `scaled_dot_product_attention`, most of all with small heads.
        """
        keys, values = self._keys[layer], self._values[layer]
        keys[:, self._used - 1] = k.flatten(0, 1)
        values[:, self._used - 1] = v.flatten(0, 1)
        queries = (q * self._head_dim**-0.5).view(len(keys), -1, self._head_dim)
        transposed_keys = keys[:, : self._used].transpose(1, 2)
        if self._mask is None:
            scores = torch.bmm(queries, transposed_keys)
        else:
            scores = torch.baddbmm(self._mask[:, :, : self._used], queries, transposed_keys)
        probs = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(probs, values[:, : self._used]).view(len(q), -1)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but `rows` [M] int64."""
        self._starts = self._starts[rows]
        heads = torch.arange(self._num_kv_heads, device=rows.device)
        buffer_rows = (rows[:, None] * self._num_kv_heads + heads).flatten()
        # Layer by layer, so that the old and the new cache never stand side by side in memory.
        for layer in range(len(self._keys)):
            self._keys[layer] = self._keys[layer].index_select(0, buffer_rows)
            self._values[layer] = self._values[layer].index_select(0, buffer_rows)
        self._mask = self._make_mask()

    def _grow(self) -> None:
        added = min(_SLOTS_PER_BLOCK, self._max_slots - self._capacity)
        for layer in range(len(self._keys)):
            self._keys[layer] = F.pad(self._keys[layer], (0, 0, 0, added))
            self._values[layer] = F.pad(self._values[layer], (0, 0, 0, added))
        self._capacity += added
        self._mask = self._make_mask()

    def _make_mask(self) -> torch.Tensor | None:
        """[B * H_kv, 1, capacity]: 0 on the slots of a row, -inf before its prompt; None where no row needs it."""
        if not self._starts.any():
            return None
        before_prompt = torch.arange(self._capacity, device=self._starts.device) < self._starts[:, None]
        mask = self._keys[0].new_zeros(before_prompt.shape).masked_fill_(before_prompt, float("-inf"))
        return mask.repeat_interleave(self._num_kv_heads, 0)[:, None]
