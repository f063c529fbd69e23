"""Whole models in float64, for proofs: models that cast to float32 inside cast to float64 instead.

Norms and softmaxes of Hugging Face models compute in float32 whatever their input, so that two right layouts
differ by 1e-7 and a small fault hides; in float64 throughout they agree to 1e-14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Float64"]

_CASTS = frozenset({torch.Tensor.to, torch.Tensor.type})


class Float64(TorchFunctionMode):  # type: ignore[misc]
    """Within it, every cast to float32 that a model writes gives float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func in _CASTS:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **kwargs)
