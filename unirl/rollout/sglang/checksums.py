"""Hashes of weights as an SGLang server holds them, computed from the trainer's tensors.

`/weights_checker` gives a hash of every parameter: under SGLang's names, in which q, k and v are one tensor, gate and
up another, and so are those of all experts of a layer, of the shard of each TP rank, by SHA-256 on CPU and by a kernel
of SGLang's own on CUDA. Experts that are spread over expert-parallel ranks of a server are not known.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping

import torch

_VOCAB_MULTIPLE = 64
_CPU_MLP_MULTIPLE = 32
_PARTS = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
"""Layer -> (layer that it is part of, its place there, number of parts)."""

_EXPERT = re.compile(r"(?P<prefix>.*\.experts\.)(?P<expert>\d+)\.(?P<layer>gate_proj|up_proj|down_proj)\.weight")
_EXPERT_PARTS = {"gate_proj": ("w13_weight", 0, 2), "up_proj": ("w13_weight", 1, 2), "down_proj": ("w2_weight", 0, 1)}
"""Layer of an expert -> (weight of all experts that it is part of, its place in an expert's share, number of parts)."""

_VOCABULARY = ("embed_tokens", "lm_head")


class ChecksumCollector:
    """Hashes the weights that pass by. Tensors that a server fuses are held until the last has come: with experts that
    is a layer's.

    device: of the server's weights, "cpu" or "cuda". dtype: theirs, which the weights are cast to.
    head_dim: of the key-value heads, which TP ranks share where there are fewer heads than ranks.
    num_experts: of a layer; 0 for a dense model.
    """

    def __init__(self, *, device: str, dtype: torch.dtype, tp: int, head_dim: int, num_experts: int = 0):
        self._device = device
        self._dtype, self._tp, self._head_dim, self._num_experts = dtype, tp, head_dim, num_experts
        self._mlp_multiple = tp * _CPU_MLP_MULTIPLE if device == "cpu" else tp
        self._waiting: dict[str, dict[int, torch.Tensor]] = {}
        self.ranks: list[dict[str, str]] = [{} for _ in range(tp)]
        """Of each TP rank: hash by the server's name, 16 hex digits."""

    def emptied(self) -> "ChecksumCollector":
        """One for other weights of the same servers."""
        return ChecksumCollector(
            device=self._device,
            dtype=self._dtype,
            tp=self._tp,
            head_dim=self._head_dim,
            num_experts=self._num_experts,
        )

    def merge(self, other: "ChecksumCollector") -> None:
        """Take up what another one has collected of the same model."""
        for ours, theirs in zip(self.ranks, other.ranks, strict=True):
            ours.update(theirs)

    def unknown(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Those of `weights`, of any device, whose layout in a server is not known."""
        return [
            name
            for name, tensor in weights.items()
            if (layer := _split_name(name)[1]) not in _PARTS and self._shard(layer, tensor, 0) is None
        ]

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """`weights`, hashed as they pass."""
        for name, tensor in weights:
            self._add(name, tensor.to(self._dtype))
            yield name, tensor

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        prefix, layer, kind = _split_name(name)
        if expert := _EXPERT.fullmatch(name):
            fused, place, count = _EXPERT_PARTS[layer]
            place += int(expert["expert"]) * count
            if parts := self._complete(f"{expert['prefix']}{fused}", place, tensor, count * self._num_experts):
                self._hash_experts(f"{expert['prefix']}{fused}", parts, count)
        elif layer in _PARTS:
            fused, place, count = _PARTS[layer]
            if parts := self._complete(f"{prefix}{fused}.{kind}", place, tensor, count):
                shards = [torch.cat([self._rows(part, rank, fused) for part in parts]) for rank in range(self._tp)]
                self._hash_shards(f"{prefix}{fused}.{kind}", shards)
        else:
            shards = [self._shard(layer, tensor, rank) for rank in range(self._tp)]
            if shards[0] is not None:
                self._hash_shards(name, shards)

    def _complete(self, fused: str, place: int, tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
        """All parts of a fused weight in their order, with the last of them; [] before."""
        parts = self._waiting.setdefault(fused, {})
        parts[place] = tensor
        if len(parts) < count:
            return []
        del self._waiting[fused]
        return [parts[place] for place in range(count)]

    def _hash_experts(self, fused: str, parts: list[torch.Tensor], count: int) -> None:
        """parts: `count` of each expert, [width, hidden] each of w13, or [hidden, width] of w2."""
        dim = 0 if count == 2 else 1
        shards = []
        for rank in range(self._tp):
            shares = [_padded(part, self._mlp_multiple, dim).chunk(self._tp, dim)[rank] for part in parts]
            experts = [torch.cat(shares[start : start + count]) for start in range(0, len(shares), count)]
            shards.append(torch.stack(experts))
        self._hash_shards(fused, shards)

    def _rows(self, part: torch.Tensor, rank: int, fused: str) -> torch.Tensor:
        """Rows of a rank; key-value heads are repeated where there are fewer of them than ranks."""
        if fused == "gate_up_proj":
            return _padded(part, self._mlp_multiple, dim=0).chunk(self._tp)[rank]
        heads = part.shape[0] // self._head_dim
        if heads < self._tp:
            return part.unflatten(0, (heads, -1))[rank * heads // self._tp]
        return part.chunk(self._tp)[rank]

    def _shard(self, layer: str, tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
        """None where it is not known how a server stores the layer."""
        if layer in _VOCABULARY:
            return _padded(tensor, math.lcm(_VOCAB_MULTIPLE, self._tp), dim=0).chunk(self._tp)[rank]
        if layer == "down_proj" and tensor.ndim == 2:
            return _padded(tensor, self._mlp_multiple, dim=1).chunk(self._tp, dim=1)[rank]
        if layer == "o_proj" and tensor.ndim == 2:
            return tensor.chunk(self._tp, dim=1)[rank]
        return tensor if layer.endswith("norm") or layer in ("gate", "down_proj", "o_proj") else None

    def _hash_shards(self, name: str, shards: list[torch.Tensor]) -> None:
        compute = _hash_on_cuda if self._device == "cuda" else _hash_on_cpu
        for rank, shard in enumerate(shards):
            self.ranks[rank][name] = compute(shard.contiguous())


def count_experts(names: Iterable[str]) -> int:
    """Experts of a layer of the model that has weights of these names; 0 where it is dense."""
    return max((int(expert["expert"]) + 1 for name in names if (expert := _EXPERT.fullmatch(name))), default=0)


def _split_name(name: str) -> tuple[str, str, str]:
    """ "model.layers.0.self_attn.q_proj.weight" -> ("model.layers.0.self_attn.", "q_proj", "weight")."""
    path, kind = name.rsplit(".", 1)
    prefix, dot, layer = path.rpartition(".")
    return prefix + dot, layer, kind


def _padded(tensor: torch.Tensor, multiple: int, dim: int) -> torch.Tensor:
    """With zeros behind, up to the multiple that the server allocates."""
    missing = list(tensor.shape)
    missing[dim] = -missing[dim] % multiple
    return torch.cat([tensor, tensor.new_zeros(missing)], dim)


def _hash_on_cpu(tensor: torch.Tensor) -> str:
    data = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).hexdigest()[:16]


_WORD, _DOUBLE = (1 << 32) - 1, (1 << 64) - 1
_SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & _WORD)
_POSITIONS = ((0x27D4EB2D, 15), (0x165667B1, 13))
_TILE_WORDS = 8192
_TILES_AT_ONCE = 128


def _hash_on_cuda(tensor: torch.Tensor) -> str:
    """The numbers of `gpu_tensor_hash` of SGLang 0.5.23: two 32-bit hashes for each tile of 8192 words, MurmurHash's
    last step over words mixed with their positions, summed over tiles, and the last step of SplitMix64.
    """
    data = tensor.reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    total, size = 0, _TILE_WORDS * _TILES_AT_ONCE
    for start in range(0, len(words), size):
        total += _hash_tiles(words[start : start + size].long() & _WORD, start, len(words) * 4 & _WORD)
    return f"{_splitmix64(total & _DOUBLE):016x}"


def _hash_tiles(words: torch.Tensor, start: int, num_bytes: int) -> int:
    position = torch.arange(start, start + len(words), device=words.device) & _WORD
    halves = []
    for seed, (factor, turn) in zip(_SEEDS, _POSITIONS, strict=True):
        mixed = ((position * factor + seed) & _WORD) ^ (((position << turn) | (position >> (32 - turn))) & _WORD)
        mixed = _murmur_end(words ^ mixed)
        tiles = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE_WORDS)).view(-1, _TILE_WORDS)
        halves.append(_murmur_end((tiles.sum(1) & _WORD) ^ num_bytes))
    return (int(halves[0].sum()) << 32) + int(halves[1].sum())


def _murmur_end(value: torch.Tensor) -> torch.Tensor:
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & _WORD
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & _WORD
    return value ^ (value >> 16)


def _splitmix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _DOUBLE
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _DOUBLE
    return value ^ (value >> 31)
