"""Values that are not finite are taken out before they meet arithmetic."""

from collections.abc import Mapping, Sequence

import torch


def finite_values(
    values: Mapping[str, torch.Tensor], mask: torch.Tensor, *, differentiable: Sequence[str]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """values, each [T], and mask [T] bool -> the values in one dtype, fp32 or wider, with 0 at every token that takes
    no part; and which tokens do [T] bool: unmasked ones all of whose values are finite.

    Only the values named in `differentiable` keep their graph. What is replaced here never meets arithmetic, so that a
    masked NaN leaves no NaN in any gradient.
    """
    dtype = torch.float32
    for value in values.values():
        dtype = torch.promote_types(dtype, value.dtype)
    live = mask
    for value in values.values():
        live = live & value.isfinite()
    values = {name: value if name in differentiable else value.detach() for name, value in values.items()}
    return {name: torch.where(live, value.to(dtype), 0) for name, value in values.items()}, live
