"""What a CPU server needs of sgl_kernel, whose wheels are built for CUDA (see README.md beside this folder).

Two functions have bodies, in plain torch. Every other name can be imported, as SGLang does at the top of its modules,
and raises NotImplementedError where it is called.
"""

from collections.abc import Callable

import torch

_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_,
    **__,
) -> None:
    """Write the cache slots of new tokens, `out_cache_loc` [sum(end - start)], into each request's row of
    `req_to_token` [requests, positions] at the columns start to end.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bits, seed 0) of the 16 bytes (seed as uint64, position as uint32, column as uint32).

    seed, positions [N]; columns [M] -> uint32 [N, M]. The same numbers as SGLang's Triton kernel of that name: a seed
    draws the same noise on CPU and on CUDA.
    """
    seed = seed.view(torch.int64)
    blocks = (seed & _MASK, (seed >> 32) & _MASK, positions.to(torch.int64) & _MASK)
    state = torch.zeros_like(seed)
    for block in blocks:
        state = _mix(state, block)
    state = _mix(state[:, None], columns.to(torch.int64)[None, :] & _MASK) ^ 16
    state = _multiply(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


_MASK = 0xFFFFFFFF


def _multiply(value: torch.Tensor, factor: int) -> torch.Tensor:
    """The low 32 bits of the product; int64 wraps around, which leaves them right."""
    return (value * factor) & _MASK


def _rotate_left(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _multiply(_rotate_left(_multiply(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate_left(state ^ block, 13) * 5 + 0xE6546B64) & _MASK


_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


def __getattr__(name: str) -> Callable:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU body in unirl/rollout/sglang/cpu_stubs")

    missing.__name__ = name
    return missing
