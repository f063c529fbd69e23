"""Parameters that are DTensors, used by modules whose code works on this rank's local tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = ["local_tensor", "use_local_parameters"]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, whether or not it is a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(slots=True)
class _Gradients:
    """Specs of the gradients of one parameter, for each stride that they have come with."""

    placements: tuple[Placement, ...]
    specs: dict[tuple[int, ...], DTensorSpec] = field(default_factory=dict)

    def spec(self, gradient: torch.Tensor, parameter: DTensorSpec) -> DTensorSpec:
        stride = gradient.stride()
        if stride not in self.specs:
            whole = DTensor.from_local(gradient.detach(), parameter.mesh, parameter.placements,
                                       run_check=False).stride()
            meta = TensorMeta(parameter.shape, whole, gradient.dtype)
            self.specs[stride] = DTensorSpec(parameter.mesh, self.placements, tensor_meta=meta)
        return copy.copy(self.specs[stride])  # operations in place write into a tensor's own


class _Local(torch.autograd.Function):  # type: ignore[misc]
    """`DTensor.to_local(grad_placements=...)`, but a gradient's spec is made once: between
    micro-batches it is the same, and making it takes longer than all else that is done here."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, gradients: _Gradients) -> torch.Tensor:
        ctx.spec, ctx.gradients = parameter._spec, gradients
        ctx.set_materialize_grads(False)
        local = parameter._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if gradient is None:
            return None, None
        spec = ctx.gradients.spec(gradient, ctx.spec)
        return DTensor(gradient.view_as(gradient), spec, requires_grad=gradient.requires_grad), None


def use_local_parameters(module: nn.Module, replicas: Placement,
                         slices: Mapping[str, tuple[int, int, int]]) -> None:
    """While `module` runs, its own parameters are local tensors: of DTensors over one mesh axis,
    what this rank holds.

    replicas: what the gradients of parameters that every rank holds whole are: `Partial()` where
        the ranks' gradients are terms of a sum, `Replicate()` where they are alike.
    slices: of parameters that every rank holds whole but uses a part of (KV heads that several
        ranks share): dim, number of parts, and which is used; the rest gets no gradient here.
    """
    if not any(p is not None for p in module._parameters.values()):
        return
    forward: Callable[..., Any] = module.forward
    found: dict[str, _Gradients] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        own, names = vars(module), []  # found before `_parameters`, which stays as it is
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            local: torch.Tensor = parameter
            if isinstance(parameter, DTensor):
                if name not in found:
                    found[name] = _Gradients(tuple(replicas if isinstance(p, Replicate) else p
                                                   for p in parameter.placements))
                local = _Local.apply(parameter, found[name])
            if name in slices:
                dim, count, part = slices[name]
                local = local.chunk(count, dim)[part]
            names.append(name)
            own[name] = local
        try:
            return forward(*args, **kwargs)
        finally:
            for name in names:
                own.pop(name, None)
    vars(module)["forward"] = call
