"""Layouts and hashes of weights in a server, against slow and plain ways to get them."""

import hashlib
import struct

import pytest
import torch

from unirl.rollout.sglang.checksums import ChecksumCollector, count_experts

WORD = 0xFFFFFFFF


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def collect(weights: dict[str, torch.Tensor], **options) -> list[dict[str, str]]:
    collector = ChecksumCollector(**{"device": "cpu", "dtype": torch.float32, "tp": 1, "head_dim": 4, **options})
    assert [name for name, _ in collector.watch(weights.items())] == list(weights)
    return collector.ranks


def test_parts_are_joined_and_padded():
    layer = "model.layers.0."
    q, k, v = torch.randn(8, 6), torch.randn(4, 6), torch.randn(4, 6)
    gate, up, down, embedding, norm = (torch.randn(*shape) for shape in ((40, 6), (40, 6), (6, 40), (97, 6), (6,)))
    [found] = collect(
        {
            "model.embed_tokens.weight": embedding,
            f"{layer}self_attn.k_proj.weight": k,
            f"{layer}self_attn.q_proj.weight": q,
            f"{layer}self_attn.v_proj.weight": v,
            f"{layer}mlp.up_proj.weight": up,
            f"{layer}mlp.gate_proj.weight": gate,
            f"{layer}mlp.down_proj.weight": down,
            f"{layer}input_layernorm.weight": norm,
        }
    )
    rows = torch.zeros(24, 6)
    assert found == {
        "model.embed_tokens.weight": sha(embedding, torch.zeros(31, 6)),
        f"{layer}self_attn.qkv_proj.weight": sha(q, k, v),
        f"{layer}mlp.gate_up_proj.weight": sha(gate, rows, up, rows),
        f"{layer}mlp.down_proj.weight": sha(torch.cat([down, torch.zeros(6, 24)], 1)),
        f"{layer}input_layernorm.weight": sha(norm),
    }


def test_ranks_hold_their_heads_rows_and_columns():
    q, k, v, o = torch.randn(16, 6), torch.randn(4, 6), torch.randn(4, 6), torch.randn(6, 16)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    ranks = collect({f"a.{name}.weight": value for name, value in zip(names, (q, k, v, o), strict=True)}, tp=2)
    for rank, found in enumerate(ranks):
        half = slice(8 * rank, 8 * rank + 8)
        # one key-value head for two ranks: both have it
        assert found == {"a.qkv_proj.weight": sha(q[half], k, v), "a.o_proj.weight": sha(o[:, half])}


def test_experts_are_one_weight():
    shapes = {"gate_proj": (32, 6), "up_proj": (32, 6), "down_proj": (6, 32)}
    experts = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(3)]
    names = [(number, name) for name in ("up_proj", "down_proj", "gate_proj") for number in (2, 0, 1)]
    weights = {f"mlp.experts.{number}.{name}.weight": experts[number][name] for number, name in names}
    assert count_experts(weights) == 3
    ranks = collect(weights | {"mlp.gate.weight": (router := torch.randn(3, 6))}, tp=2, num_experts=3, device="cuda")
    for rank, found in enumerate(ranks):
        half = slice(16 * rank, 16 * rank + 16)
        w13 = [torch.cat([expert["gate_proj"][half], expert["up_proj"][half]]) for expert in experts]
        w2 = [expert["down_proj"][:, half] for expert in experts]
        fused = {"mlp.experts.w13_weight": torch.stack(w13), "mlp.experts.w2_weight": torch.stack(w2)}
        assert found == {
            name: slow_cuda_hash(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            for name, tensor in (fused | {"mlp.gate.weight": router}).items()
        }


def test_weights_are_hashed_in_the_servers_dtype():
    norm = torch.randn(6)
    [found] = collect({"norm.weight": norm}, dtype=torch.bfloat16)
    assert found == {"norm.weight": sha(norm.bfloat16().view(torch.int16))}


def test_an_unknown_layout_is_noted():
    collector = ChecksumCollector(device="cpu", dtype=torch.float32, tp=1, head_dim=4)
    weights = {"experts.w1": torch.zeros(2), "norm.weight": torch.zeros(2)}
    assert collector.unknown(weights) == ["experts.w1"]
    list(collector.watch(weights.items()))
    assert list(collector.ranks[0]) == ["norm.weight"]


def slow_cuda_hash(data: bytes) -> str:
    """The kernel of SGLang, word for word."""

    def fmix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x85EBCA6B & WORD
        x = (x ^ (x >> 13)) * 0xC2B2AE35 & WORD
        return x ^ (x >> 16)

    def turn(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (32 - bits))) & WORD

    words = [word for (word,) in struct.iter_unpack("<I", data + bytes(-len(data) % 4))]
    seed = 0x243F6A88
    seeds = seed, (seed * 0x9E3779B1 ^ 0xDEADBEEF) & WORD
    total = 0
    for tile in range(0, len(words), 8192):
        first = second = 0
        for i, word in enumerate(words[tile : tile + 8192], start=tile):
            first += fmix(word ^ ((i * 0x27D4EB2D + seeds[0]) & WORD) ^ turn(i, 15))
            second += fmix(word ^ ((i * 0x165667B1 + seeds[1]) & WORD) ^ turn(i, 13))
        num_bytes = len(words) * 4
        total += (fmix((first & WORD) ^ num_bytes) << 32) | fmix((second & WORD) ^ num_bytes)
    mask = (1 << 64) - 1
    total &= mask
    total = (total ^ (total >> 30)) * 0xBF58476D1CE4E5B9 & mask
    total = (total ^ (total >> 27)) * 0x94D049BB133111EB & mask
    return f"{total ^ (total >> 31):016x}"


@pytest.mark.parametrize("size", [1, 2, 8191, 8193, 20_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hash_of_cuda_servers(size, dtype):
    norm = torch.randn(size).to(dtype)
    [found] = collect({"norm.weight": norm}, device="cuda", dtype=dtype)
    assert found["norm.weight"] == slow_cuda_hash(norm.view(torch.uint8).numpy().tobytes())
