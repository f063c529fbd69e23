"""Recompute: which of a layer's saved activations are dropped and computed again in backward.

    none        everything that autograd saves is kept
    selective   outputs of matmuls and attention are kept, the rest is computed again
    full        only the layer's inputs are kept

The random state at the layer's entry is restored, so dropout masks are the same again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

__all__ = ["SAVED_OPS", "recomputed"]

RecomputeMode = Literal["none", "selective", "full"]

_aten = torch.ops.aten
SAVED_OPS = [
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_attention_math.default,
]
"""What selective recompute keeps."""


def recomputed(mode: RecomputeMode, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with the given recompute."""
    if mode == "none":
        return forward
    extra: dict[str, Any] = {}
    if mode == "selective":
        extra["context_fn"] = functools.partial(create_selective_checkpoint_contexts, SAVED_OPS)
    return functools.partial(checkpoint, forward, use_reentrant=False, **extra)
