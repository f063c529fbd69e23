"""What happens to gradients between the last backward and the update: finish, norm, clip."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executor.mesh import ParallelMesh

__all__ = ["clip", "finish_partial", "global_norm"]


def finish_partial(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients that are still one term a rank (tensor parallelism without FSDP2)."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def global_norm(gradients: Iterable[torch.Tensor], mesh: ParallelMesh) -> torch.Tensor:
    """The 2-norm over the whole model; `gradients` are this rank's, each parameter once.

    Gradients are grouped by their mesh, since one norm cannot span two.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        key = id(gradient.device_mesh) if isinstance(gradient, DTensor) else 0
        groups.setdefault(key, []).append(gradient)
    square = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for group in groups.values():
        norm = torch.nn.utils.get_total_norm(group)
        square += (norm.full_tensor() if isinstance(norm, DTensor) else norm).double() ** 2
    return mesh.all_reduce_pp(square).sqrt()


def clip(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients so that their global norm, `norm`, is at most max_norm."""
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    own = [grad.to_local() if isinstance(grad, DTensor) else grad
           for grad in (parameter.grad for parameter in parameters) if grad is not None]
    if factor < 1.0 and own:
        torch._foreach_mul_(own, factor)
