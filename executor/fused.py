"""Parameters that hold several matrices side by side (fused q, k, v), divided matrix by matrix.

A shard must hold its part of each matrix, so the rows are interleaved before a contiguous division:

    [q0 q1 | k0 k1 | v0 v1]  ->  [q0 k0 v0 | q1 k1 v1]        (3 matrices, degree 2)

Documents (checkpoints) hold the original order.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

__all__ = ["copy_whole", "deinterleaved", "interleaved"]


def interleaved(tensor: torch.Tensor, dim: int, matrices: int, degree: int) -> torch.Tensor:
    """From the original order to that in which contiguous shards are right."""
    parts = tensor.unflatten(dim, (matrices, degree, -1)).transpose(dim, dim + 1)
    return parts.flatten(dim, dim + 2)


def deinterleaved(tensor: torch.Tensor, dim: int, matrices: int, degree: int) -> torch.Tensor:
    """The inverse of `interleaved`."""
    parts = tensor.unflatten(dim, (degree, matrices, -1)).transpose(dim, dim + 1)
    return parts.flatten(dim, dim + 2)


def copy_whole(tensor: torch.Tensor, whole: torch.Tensor, fused: tuple[int, int] | None,
               degree: int) -> None:
    """Put a whole tensor, in its original order, into `tensor`, whatever that has of it."""
    data = whole if fused is None else interleaved(whole, *fused, degree)
    if not isinstance(tensor, DTensor):
        tensor.copy_(data)
        return
    local = tensor.to_local()
    # replicated: from there any sharding is a local slice
    made = distribute_tensor(data.to(local), tensor.device_mesh,
                             [Replicate()] * len(tensor.placements), src_data_rank=None)
    local.copy_(made.redistribute(placements=tensor.placements).to_local())
