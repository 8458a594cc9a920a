"""The `triton` back-end: kernels for NVIDIA GPUs, and for the CPU in Triton's interpreter (TRITON_INTERPRET=1, slow).

Importing this package imports triton, so nothing but `backends` and tools for it does.
"""

from unirl.kernels.triton.backend import (
    FUSES_ROWS,
    INTERPRETED,
    combine,
    row_records,
    scale_gradient,
    supports,
    token_losses,
    write_gradient,
)

__all__ = [
    "FUSES_ROWS",
    "INTERPRETED",
    "combine",
    "row_records",
    "scale_gradient",
    "supports",
    "token_losses",
    "write_gradient",
]
