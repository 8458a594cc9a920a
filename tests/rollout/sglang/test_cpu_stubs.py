"""What stands in for SGLang's CUDA kernels on CPU servers."""

import importlib.util
import struct
import sys

import pytest
import torch

from unirl.rollout.sglang.launch import CPU_STUBS

WORD = 0xFFFFFFFF


@pytest.fixture(scope="module")
def sgl_kernel():
    spec = importlib.util.spec_from_file_location("sgl_kernel", CPU_STUBS / "sgl_kernel" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    assert "sgl_kernel" not in sys.modules
    spec.loader.exec_module(module)
    return module


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32, seed 0, of whole words: github.com/aappleby/smhasher."""

    def turn(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (32 - bits))) & WORD

    state = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = turn(block * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        state = (turn(state ^ block, 13) * 5 + 0xE6546B64) & WORD
    state ^= len(data)
    state = (state ^ (state >> 16)) * 0x85EBCA6B & WORD
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & WORD
    return state ^ (state >> 16)


def test_murmur_hash(sgl_kernel):
    seeds, positions, columns = [0, 7, 2**63 - 1, 2**64 - 1], [0, 5, 2**31, 17], [0, 1, 150_000]
    found = torch.ops.sgl_kernel.murmur_hash32_cpu(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert found.dtype == torch.uint32
    assert found.tolist() == expected


def test_slots_are_written_row_by_row(sgl_kernel):
    table = torch.zeros(3, 6, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([4, 5])
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([11, 12, 13, 21, 22]))
    assert table.tolist() == [[0, 0, 0, 21, 22, 0], [0] * 6, [0, 11, 12, 13, 0, 0]]


def test_what_has_no_body_can_be_imported_and_not_called(sgl_kernel):
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.top_k_renorm_prob has no CPU body"):
        sgl_kernel.top_k_renorm_prob(None)
