"""Seconds of the optimizer step, of the gradient norm and of copying gradients together, over a
model's own parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn

from profiler.building import DTYPES
from profiler.layer_graph import LayerGraph
from profiler.memory_meter import MemoryMeter
from profiler.profile import UpdateSeconds
from profiler.team import ALONE, Team
from profiler.timing import Budget, Clock, repeat_until_settled, spread

__all__ = ["make_optimizer", "update_seconds"]

BYTES_PER_PARAMETER = 24
"""Parameter, gradient, two moments, and temporaries of an unfused step, in float32."""


def make_optimizer(name: str, parameters: Sequence[nn.Parameter], *, fused: bool
                   ) -> torch.optim.Optimizer:
    """As the executor's command line makes it: fused, or one parameter after the other."""
    how: dict[str, Any] = {"fused": True} if fused else {"foreach": False}
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-5, **how)
    momentum = 0.9 if name == "sgd-momentum" else 0.0
    return torch.optim.SGD(parameters, lr=1e-5, momentum=momentum, **how)


def update_seconds(graph: LayerGraph, device: torch.device, stored_dtype: str, optimizer: str,
                   available_bytes: int, budget: Budget, team: Team = ALONE,
                   timer: Callable[[], float] = time.perf_counter, *, fused: bool = True
                   ) -> UpdateSeconds:
    """Measure over as many of the model's parameters as fit; float32 or bfloat16 ones."""
    dtype = DTYPES[stored_dtype]
    most = available_bytes // BYTES_PER_PARAMETER
    of_layer: dict[int, list[nn.Parameter]] = {}
    count = 0
    for layer, parameter in graph.iter_parameters():
        numel = prod(parameter.shape)
        if parameter.trainable and (not count or count + numel <= most):
            of_layer.setdefault(layer, []).append(
                nn.Parameter(torch.full(parameter.shape, 0.5, dtype=dtype, device=device)))
            count += numel
    parameters = [parameter for layer in of_layer.values() for parameter in layer]
    made = make_optimizer(optimizer, parameters, fused=fused)
    clock = Clock(device, timer, align=team.align)

    def once() -> dict[str, float]:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-4)
        clock.flush()
        moments: list[Any] = [clock.start()]
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        del grads
        moments.append(clock.mark())
        for layer in of_layer.values():
            torch.cat([p.grad.view(-1) for p in layer if p.grad is not None])
        moments.append(clock.mark())
        made.step()
        made.zero_grad(set_to_none=True)
        moments.append(clock.mark())
        return {name: clock.between(*pair) for name, pair in zip(
            ("norm", "staging", "update"), pairwise(moments), strict=True)}

    samples, _ = repeat_until_settled(once, ("update",), budget, team.agree)
    samples, _ = team.together(samples)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-4)
    with MemoryMeter(device) as meter:
        made.step()
    return UpdateSeconds(
        optimizer=optimizer, fused=fused, stored_dtype=stored_dtype, num_parameters=count,
        update_s=samples.median("update"), norm_s=samples.median("norm"),
        staging_s=samples.median("staging"),
        temporary_bytes=max(0, meter.peak_bytes), spread=spread(samples.parts["update"]))
