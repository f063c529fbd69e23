"""Losses of models of one's own, traced and measured as the executor computes them.

A function that builds a model returns (module, example inputs), and, where the module returns
predictions and no loss, the loss as a third item: a name of `TOTALS`, or an object with
`total(predictions, targets)` (`executor.losses.Loss`) and a fourth item, example targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph

__all__ = ["IGNORED", "OWN", "TOTALS", "Built", "attach", "attached", "named_loss",
           "prediction_of", "summed_cross_entropy", "summed_squared_error", "taken_apart"]

IGNORED = -100
"""Target of a token that counts for nothing, as in torch and transformers."""

OWN = "own"
"""The name of a loss that is an object."""


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


def summed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits (..., classes), in float32 at least; targets (...)."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum",
                           ignore_index=IGNORED)


def summed_squared_error(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of two tensors of one shape."""
    return F.mse_loss(predictions, targets, reduction="sum")


TOTALS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross-entropy": summed_cross_entropy, "mean-squared-error": summed_squared_error}
"""Sums over the terms of a micro-batch, by the names that the command line knows them by."""


@dataclass(frozen=True, slots=True)
class Built:
    """What a function returned. loss: of `TOTALS`, an object with `total`, or None."""

    module: nn.Module
    inputs: Any = None
    loss: Any = None
    targets: Any = None

    @property
    def loss_name(self) -> str | None:
        """What a LayerGraph calls the loss."""
        return self.loss if self.loss is None or isinstance(self.loss, str) else OWN


def named_loss(graph: LayerGraph) -> str | None:
    """The loss that a graph's function named (see `Built.loss_name`), if it named one."""
    return graph.source.loss if graph.source.loss in (*TOTALS, OWN) else None


def taken_apart(made: Any, where: str) -> Built:
    """(module[, example inputs[, loss[, example targets]]]) as what it means.

    Raises:
        InvalidInput: it is something else; `where` is named.
    """
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 4 or not isinstance(parts[0], nn.Module):
        found = ", ".join(type(part).__name__ for part in parts)
        raise InvalidInput(f"{where}: must return (module, example inputs), and where the module "
                           f"returns no loss, the loss as a third item; it returned ({found})")
    built = Built(*parts)
    if isinstance(built.loss, str) and built.loss not in TOTALS:
        raise InvalidInput(f"{where}: the loss {built.loss!r}: there are {', '.join(TOTALS)}, or "
                           "pass an executor.losses.Loss and example targets")
    if built.loss is not None and not isinstance(built.loss, str):
        if not callable(getattr(built.loss, "total", None)):
            raise InvalidInput(f"{where}: the loss, a {type(built.loss).__name__}, has no "
                               f"total(predictions, targets): give an executor.losses.Loss, or one "
                               f"of {', '.join(TOTALS)}")
        if built.targets is None:
            raise InvalidInput(f"{where}: a loss of your own needs example targets, as a fourth "
                               "item")
    return built


@contextmanager
def attached(built: Built) -> Iterator[None]:
    """`attach`, for the length of a block."""
    before = vars(built.module).get("forward")
    try:
        attach(built)
        yield
    finally:
        vars(built.module).pop("forward", None)
        if before is not None:
            built.module.forward = before


def attach(built: Built) -> None:
    """Let the module return its loss, of predictions and targets that are made on the spot.

    Raises:
        InvalidInput: the module is one layer, which has no place for work outside of it.
    """
    if built.loss is None:
        return
    if next(built.module.children(), None) is None:
        raise InvalidInput(f"{type(built.module).__name__} holds no other module, so that a loss "
                           "cannot be told from it: put it into a torch.nn.Sequential")
    forward = built.module.forward
    example = next((t for t in pytree.tree_leaves(built.inputs) if isinstance(t, torch.Tensor)),
                   None)

    def with_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        predictions = prediction_of(forward(*args, **kwargs))
        if isinstance(built.loss, str):
            return TOTALS[built.loss](predictions, _targets(built.loss, predictions))
        given = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        total: torch.Tensor = built.loss.total(predictions, pytree.tree_map(
            lambda leaf: _resized(leaf, example, given, predictions), built.targets))
        return total

    built.module.forward = with_loss


def _targets(loss: str, predictions: torch.Tensor) -> torch.Tensor:
    """One for each prediction."""
    if loss == "cross-entropy":
        return torch.zeros(predictions.shape[:-1], dtype=torch.long, device=predictions.device)
    return torch.zeros_like(predictions, requires_grad=False)


def _resized(leaf: Any, example: Any, given: torch.Tensor, predictions: torch.Tensor) -> Any:
    """Example targets for as many samples, and of such a length, as the inputs have."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = list(leaf.shape)
    if shape and shape[0] == example.shape[0]:
        shape[0] = given.shape[0]
        if len(shape) > 1 and example.dim() > 1 and shape[1] == example.shape[1]:
            shape[1] = given.shape[1]
    dtype = predictions.dtype if leaf.dtype.is_floating_point else leaf.dtype
    return torch.zeros(shape, dtype=dtype, device=predictions.device)
