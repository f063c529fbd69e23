"""Stand-ins that let a model run without memory, and as it would on an accelerator.

Parameters become fake bfloat16 tensors, so that whatever the model computes in another type
shows itself. Three operations whose CPU form differs from the accelerator's are replaced:

    scaled_dot_product_attention   always fused: keeps q, k, v, out and a float32 logsumexp
    dropout                        the fused kernel: keeps a mask of one byte an element
    experts of a mixture           routing depends on data, so a balanced one is assumed: each
                                   of E experts gets tokens * top_k / E rows, in one grouped matmul
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from profiler.trace_recorder import Recorder

__all__ = ["COMPUTE_DTYPE", "accelerator_forms", "balanced_experts", "fake_parameters",
           "is_experts"]

COMPUTE_DTYPE = torch.bfloat16


@contextmanager
def fake_parameters(model: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Exchange every parameter, buffer and tensor attribute for a fake one, then put them back.

    Must be entered under a FakeTensorMode. Yields the fake parameters by the id of the real ones.
    """
    fakes: dict[int, torch.Tensor] = {}
    undo: list[tuple[dict[str, Any], str, Any]] = []

    def fake(tensor: torch.Tensor, is_parameter: bool) -> torch.Tensor:
        if id(tensor) not in fakes:
            floating = tensor.dtype.is_floating_point
            dtype = COMPUTE_DTYPE if is_parameter and floating else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=dtype, device="cpu")
            fakes[id(tensor)] = (nn.Parameter(empty, requires_grad=tensor.requires_grad)
                                 if is_parameter else empty)
        return fakes[id(tensor)]

    try:
        for module in model.modules():
            for store, is_parameter in ((module._parameters, True), (module._buffers, False),
                                        (vars(module), False)):
                for key, value in list(store.items()):
                    if isinstance(value, torch.Tensor):
                        undo.append((store, key, value))
                        store[key] = fake(value, is_parameter)
        yield fakes
    finally:
        for store, key, value in undo:
            store[key] = value


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Fused attention: shapes, strides and saved tensors of the flash kernel, no arithmetic."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, causal: bool, query: torch.Tensor,
                key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        with recorder.muted():
            *batch, heads, queries, _ = query.shape
            out = torch.empty_like(query)  # the kernel's output takes the layout of its query
            if value.shape[-1] != query.shape[-1]:
                out = query.new_empty((*batch, queries, heads, value.shape[-1])).transpose(-2, -3)
            statistics = query.new_empty((*batch, heads, queries), dtype=torch.float32)
        recorder.attention((query, key, value, mask), (out, statistics), causal)
        ctx.recorder = recorder
        ctx.save_for_backward(query, key, value, mask, out, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, mask, out, statistics = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        with ctx.recorder.muted():
            grads = [torch.empty_like(t) if want and t is not None else None
                     for t, want in zip((query, key, value, mask), wanted, strict=True)]
        ctx.recorder.attention_backward(
            (grad, query, key, value, mask, out, statistics), [g for g in grads if g is not None])
        return (None, None, *grads)


def _attention(recorder: Recorder, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Any:
    return _Attention.apply(recorder, is_causal, query, key, value, attn_mask)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True,
             inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


class _Intercept(TorchFunctionMode):  # type: ignore[misc]
    """Catches attention and dropout wherever a model took the function from."""

    def __init__(self, replacements: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._replacements = replacements

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        return self._replacements.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def accelerator_forms(recorder: Recorder) -> Iterator[None]:
    """Send attention and dropout to their accelerator forms."""
    attention = functools.partial(_attention, recorder)
    originals = {"scaled_dot_product_attention": F.scaled_dot_product_attention,
                 "dropout": F.dropout}
    replacements: dict[Any, Callable[..., Any]] = {
        F.scaled_dot_product_attention: attention, F.dropout: _dropout, torch.dropout: _dropout}
    try:  # functions of torch.nn.functional call each other past the mode: patched there too
        F.scaled_dot_product_attention, F.dropout = attention, _dropout
        with _Intercept(replacements):
            yield
    finally:
        for name, original in originals.items():
            setattr(F, name, original)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the experts of a Hugging Face mixture as 3-D weights.

    Its forward takes hidden states, and the index and weight of the experts of each token.
    """
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return (all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)
            and hasattr(module, "_apply_gate")
            and len(inspect.signature(type(module).forward).parameters) == 4)


def balanced_experts(module: Any, recorder: Recorder, hidden: torch.Tensor, index: torch.Tensor,
                     weights: torch.Tensor) -> torch.Tensor:
    """What the experts compute when every expert is chosen equally often, in the form of the
    grouped matmul of transformers 5 (integrations/moe.py, grouped_mm_experts_forward).

    hidden (tokens, width); index and weights (tokens, top_k).
    """
    has_bias = getattr(module, "has_bias", False)
    num_experts, top_k, width = module.gate_up_proj.shape[0], index.shape[-1], hidden.shape[-1]
    transposed = getattr(module, "is_transposed", False)
    gate_up, down = (weight if transposed else weight.transpose(1, 2)
                     for weight in (module.gate_up_proj, module.down_proj))
    order = index.flatten().argsort()
    token, back = order // top_k, order.argsort()
    rows = hidden.index_select(0, token).view(num_experts, -1, width)
    with recorder.experts(hidden):
        inner = torch.bmm(rows, gate_up)
        if has_bias:
            inner = inner + module.gate_up_proj_bias.unsqueeze(1)
        out = torch.bmm(module._apply_gate(inner), down)
    if has_bias:
        out = out + module.down_proj_bias.unsqueeze(1)
    out = out.view(-1, width) * weights.flatten()[order].unsqueeze(-1)
    out = out.index_select(0, back).view(-1, top_k, width).sum(dim=1)
    return out.to(hidden.dtype)
