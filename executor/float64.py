"""Whole models in float64, for proofs: models that cast to float32 inside cast to float64 instead.

Norms and softmaxes of Hugging Face models compute in float32 whatever their input, so that two
right layouts differ by 1e-7 and a small fault hides; in float64 throughout they agree to 1e-14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["float64"]


def _widened(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)
    return call


@contextmanager
def float64() -> Iterator[None]:
    """Within it, `.to(torch.float32)`, `.float()` and softmax in float32 give float64.

    The methods are exchanged, rather than caught by a TorchFunctionMode: such a mode is off during
    backward, where layers are recomputed.
    """
    softmax = F.softmax
    names = ("to", "type", "float")
    to, type_ = torch.Tensor.to, torch.Tensor.type
    try:
        torch.Tensor.to, torch.Tensor.type = _widened(to), _widened(type_)
        torch.Tensor.float = torch.Tensor.double
        F.softmax = _widened(softmax)
        yield
    finally:
        for name in names:  # torch.Tensor inherits them
            delattr(torch.Tensor, name)
        F.softmax = softmax
