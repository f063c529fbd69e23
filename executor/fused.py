"""Parameters that hold several matrices side by side (fused q, k, v), divided matrix by matrix.

A shard must hold its part of each matrix, so the rows are interleaved before a contiguous division:

    [q0 q1 | k0 k1 | v0 v1]  ->  [q0 k0 v0 | q1 k1 v1]        (3 matrices, degree 2)

Documents (checkpoints) hold the original order.
"""

from __future__ import annotations

import torch

__all__ = ["deinterleaved", "interleaved"]


def interleaved(tensor: torch.Tensor, dim: int, matrices: int, degree: int) -> torch.Tensor:
    """From the original order to that in which contiguous shards are right."""
    parts = tensor.unflatten(dim, (matrices, degree, -1)).transpose(dim, dim + 1)
    return parts.flatten(dim, dim + 2)


def deinterleaved(tensor: torch.Tensor, dim: int, matrices: int, degree: int) -> torch.Tensor:
    """The inverse of `interleaved`."""
    parts = tensor.unflatten(dim, (degree, matrices, -1)).transpose(dim, dim + 1)
    return parts.flatten(dim, dim + 2)
