"""How rows are cut for each GPU: plain tables, read at launch, so that no kernel's definition knows of a GPU.

A chunk of a row is what one program takes; a tile is what it holds in registers at a time: `vectors` accesses of 16
bytes by each of its threads. **Chunks and tiles of the statistics do not depend on the number of rows, nor on whether
the entropy is asked for**: they fix the order in which a row is added up, so a row's log-prob is the same, bit for bit,
in every batch. Chunks that fill the GPU with a few rows cost large batches next to nothing: 12 bytes for each chunk.
"""

from dataclasses import dataclass

import torch

ACCESS_BYTES = 16
WARP_THREADS = 32


@dataclass(frozen=True)
class RowShape:
    """vectors: 16-byte accesses of a thread per tile. warps: of a program. tiles: of a chunk."""

    vectors: int
    warps: int
    tiles: int

    def constants(self, dtype: torch.dtype) -> dict[str, int]:
        """The compile-time sizes of a row kernel for logits of `dtype`."""
        elements = ACCESS_BYTES // dtype.itemsize
        threads = WARP_THREADS * self.warps
        return {
            "VECTORS": self.vectors,
            "THREADS": threads,
            "ELEMENTS": elements,
            "CHUNK": self.tiles * self.vectors * threads * elements,
        }


Key = tuple[str, torch.dtype, bool]
"""GPU architecture (sm_90, sm_100, or interpreter), dtype of the logits, whether the entropy takes part."""

_SHAPES = {
    ("sm_90", torch.bfloat16): RowShape(vectors=4, warps=4, tiles=4),
    ("sm_90", torch.float32): RowShape(vectors=4, warps=4, tiles=8),
    # as few and large numpy calls as still cut a row of 5,000 columns into tiles and one of 50,000 into chunks
    ("interpreter", torch.bfloat16): RowShape(vectors=4, warps=4, tiles=4),
    ("interpreter", torch.float32): RowShape(vectors=4, warps=8, tiles=4),
}
"""Chosen by the registers and access widths of the compiled kernels; not timed on a GPU yet."""
STATISTICS: dict[Key, RowShape] = {
    (arch, dtype, with_entropy): shape for (arch, dtype), shape in _SHAPES.items() for with_entropy in (False, True)
}
GRADIENT: dict[Key, RowShape] = dict(STATISTICS)
UNTUNED = "sm_90"
"""Whose entries serve an architecture that has none."""

TOKENS = 32
"""Tokens of one program of the kernels that work on a few numbers per token; one warp."""

SCALE_PROGRAMS = 1024
"""Programs of `scale_gradient`: as many as fit the largest GPU at a time."""


def row_shape(table: dict[Key, RowShape], arch: str, dtype: torch.dtype, with_entropy: bool) -> RowShape:
    """The entry of `table`, of UNTUNED where it has none for `arch`."""
    return table.get((arch, dtype, with_entropy)) or table[UNTUNED, dtype, with_entropy]
