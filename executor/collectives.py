"""The two collectives of sequence parallelism, each the other's backward.

x_BSH is sharded by sequence, dim 1. Functional collectives are used so that recompute policies see
them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["gather_sequence", "reduce_scatter_sequence"]


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    size = group.size()
    ops = torch.ops._c10d_functional
    y = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    return torch.cat(y.chunk(size, dim=0), dim=1) if x.shape[0] > 1 else y.flatten(0, 1)[None]


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    size = group.size()
    ops = torch.ops._c10d_functional
    stacked = torch.cat(x.chunk(size, dim=1), dim=0)
    return ops.wait_tensor(ops.reduce_scatter_tensor(stacked.contiguous(), "sum", size,
                                                     group.group_name))


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, ctx.group), None


def gather_sequence(x_BSH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(B, S/t, ...) on each rank -> (B, S, ...); the gradients of all ranks are summed."""
    return _Gather.apply(x_BSH, group)


def reduce_scatter_sequence(x_BSH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(B, S, ...), a term of a sum on each rank -> (B, S/t, ...) of the sum."""
    return _ReduceScatter.apply(x_BSH, group)
