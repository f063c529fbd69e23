"""Losses as sums with counts, so that the mean is over the global batch whatever its division.

A mean over each micro-batch, averaged, is wrong as soon as micro-batches hold unequal numbers of
real tokens. A `Loss` therefore gives the sum over a micro-batch and the number of terms; the
executor divides by the count over all micro-batches of all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from profiler.losses import IGNORED, prediction_of, summed_cross_entropy, summed_squared_error

__all__ = ["LOSSES", "Loss", "cross_entropy", "mean_squared_error", "prediction_of", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss over a global batch.

    total: (outputs, targets) of one micro-batch -> the sum of its terms, a scalar. Under tensor
        parallelism `outputs` is a DTensor if `divided`, else the whole tensor.
    count: targets -> number of terms in the sum.
    name: that tracing knows it by.
    """

    total: Callable[[Any, torch.Tensor], torch.Tensor]
    count: Callable[[torch.Tensor], float]
    divided: bool = False
    name: str | None = None


def whole(tensor: Any) -> Any:
    """The whole of a DTensor that every rank goes on to use alike."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()
    return tensor


def _cross_entropy_total(logits: Any, targets: torch.Tensor) -> torch.Tensor:
    if not isinstance(logits, DTensor):
        return summed_cross_entropy(logits, targets)
    mesh, (placement,) = logits.device_mesh, logits.placements
    if placement == Shard(logits.dim() - 1):
        # loss_parallel must also hold during backward: the caller runs both within `step_context`
        total: Any = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum",
                                     ignore_index=IGNORED)
        return whole(total)
    if placement == Shard(1):  # each rank has some of the tokens: the sum of their sums
        width, rank = targets.shape[1] // mesh.size(), mesh.get_local_rank()
        mine = targets.narrow(1, rank * width, width)
        partial = summed_cross_entropy(logits.to_local(), mine)
        return whole(DTensor.from_local(partial, mesh, [Partial()], run_check=False))
    return summed_cross_entropy(whole(logits), targets)


def cross_entropy() -> Loss:
    """Cross-entropy of logits (batch, ..., classes) and classes (batch, ...); -100 is ignored.

    Targets of a causal model are the next tokens: nothing is shifted here.
    """
    return Loss(total=_cross_entropy_total, divided=True, name="cross-entropy",
                count=lambda targets: float((targets != IGNORED).sum().item()))


def mean_squared_error() -> Loss:
    """Squared error, averaged over every element."""
    return Loss(total=summed_squared_error, name="mean-squared-error",
                count=lambda targets: float(targets.numel()))


LOSSES: dict[str, Callable[[], Loss]] = {"cross-entropy": cross_entropy,
                                         "mean-squared-error": mean_squared_error}
"""By the name that the command line knows them by."""
