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

from profiler.errors import InvalidInput

__all__ = ["LOSSES", "Loss", "cross_entropy", "mean_squared_error", "prediction_of", "whole"]

IGNORED = -100
"""Target of a token that counts for nothing, as in torch and transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss over a global batch.

    total: (outputs, targets) of one micro-batch -> the sum of its terms, a scalar. Under tensor
        parallelism `outputs` is a DTensor if `divided`, else the whole tensor.
    count: targets -> number of terms in the sum.
    """

    total: Callable[[Any, torch.Tensor], torch.Tensor]
    count: Callable[[torch.Tensor], float]
    divided: bool = False


def prediction_of(outputs: Any) -> Any:
    """What a loss is taken of: the logits of a Hugging Face output, or the (first) tensor."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if getattr(outputs, "logits", None) is not None:
        return outputs.logits
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], torch.Tensor):
        return outputs[0]
    raise InvalidInput(f"the model returns {type(outputs).__name__}: a tensor, a tuple that starts "
                       f"with one, or an output with logits is needed")


def whole(tensor: Any) -> Any:
    """The whole of a DTensor that every rank goes on to use alike."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()
    return tensor


def _cross_entropy_total(logits: Any, targets: torch.Tensor) -> torch.Tensor:
    if not isinstance(logits, DTensor):
        return _summed(logits, targets)
    mesh, (placement,) = logits.device_mesh, logits.placements
    if placement == Shard(logits.dim() - 1):
        # loss_parallel must also hold during backward: the caller runs both within `step_context`
        total: Any = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum",
                                     ignore_index=IGNORED)
        return whole(total)
    if placement == Shard(1):  # each rank has some of the tokens: the sum of their sums
        width, rank = targets.shape[1] // mesh.size(), mesh.get_local_rank()
        mine = targets.narrow(1, rank * width, width)
        partial = _summed(logits.to_local(), mine)
        return whole(DTensor.from_local(partial, mesh, [Partial()], run_check=False))
    return _summed(whole(logits), targets)


def _summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits (..., classes) in float32 at least, targets (...)."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum",
                           ignore_index=IGNORED)


def cross_entropy() -> Loss:
    """Cross-entropy of logits (batch, ..., classes) and classes (batch, ...); -100 is ignored.

    Targets of a causal model are the next tokens: nothing is shifted here.
    """
    return Loss(total=_cross_entropy_total, divided=True,
                count=lambda targets: float((targets != IGNORED).sum().item()))


def mean_squared_error() -> Loss:
    """Squared error, averaged over every element."""
    return Loss(total=lambda outputs, targets: F.mse_loss(outputs, targets, reduction="sum"),
                count=lambda targets: float(targets.numel()))



LOSSES: dict[str, Callable[[], Loss]] = {"cross-entropy": cross_entropy,
                                         "mean-squared-error": mean_squared_error}
"""By the name that the command line knows them by."""
