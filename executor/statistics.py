"""Batch normalization over the global batch: its statistics are those of all data-parallel ranks.

The rank's own sums of x and of (x - mean)^2 are reduced over the ranks that hold other samples, and
so are their gradients, since every rank's loss depends on every rank's x. Right with one
micro-batch a step; with more, or where a layer is recomputed, such a model is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from executor.mesh import ParallelMesh

__all__ = ["has_statistics", "synchronize_statistics"]

BatchNorm = nn.modules.batchnorm._BatchNorm


def has_statistics(module: nn.Module) -> bool:
    """Whether a module normalizes by statistics of the batch that it is given."""
    return isinstance(module, BatchNorm) and module.training


def synchronize_statistics(model: nn.Module, mesh: ParallelMesh) -> None:
    """Let every batch normalization of a model see the whole batch."""
    if mesh.spec.dp == 1:
        return
    for module in model.modules():
        if isinstance(module, BatchNorm):
            vars(module)["forward"] = _over_ranks(module, module.forward, mesh)


class _Sum(torch.autograd.Function):  # type: ignore[misc]
    """The sum over the data-parallel ranks, of values and of gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return mesh.all_reduce_dp(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.mesh.all_reduce_dp(grad.clone()), None


def _over_ranks(module: Any, forward: Callable[[torch.Tensor], torch.Tensor], mesh: ParallelMesh
                ) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x_BC: torch.Tensor) -> torch.Tensor:
        """x (B, C, ...)."""
        if not module.training:
            return forward(x_BC)
        x = x_BC.float() if x_BC.dtype in (torch.bfloat16, torch.float16) else x_BC
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        count = x.numel() // x.shape[1] * mesh.spec.dp
        mean = _Sum.apply(x.sum(dims), mesh) / count
        centred = x - mean.view(shape)
        variance = _Sum.apply(centred.square().sum(dims), mesh) / count
        _remember(module, mean.detach(), variance.detach() * count / max(count - 1, 1))
        out = centred * (variance + module.eps).rsqrt().view(shape)
        if module.affine:
            out = out * module.weight.view(shape) + module.bias.view(shape)
        return out.to(x_BC.dtype)
    return call


def _remember(module: Any, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Running statistics, as `nn.BatchNorm2d` keeps them."""
    if not module.track_running_stats:
        return
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        share = module.momentum
        if share is None:
            share = 1.0 / float(module.num_batches_tracked)
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), share)
        module.running_var.lerp_(variance.to(module.running_var.dtype), share)
