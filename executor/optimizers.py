"""The optimizer that a layout was planned for, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import nn

from planner.request import Request

__all__ = ["LR_SCHEDULES", "Lion", "Rate", "make_optimizer", "make_rate"]

LrSchedule = Literal["constant", "linear", "cosine"]
LR_SCHEDULES: tuple[LrSchedule, ...] = get_args(LrSchedule)

Rate = Callable[[int], float]
"""Step (from 0) -> share of the learning rate."""

MOMENTUM = 0.9


class Lion(torch.optim.Optimizer):  # type: ignore[misc]
    """Evolved sign momentum: algorithm 2 of Chen et al. 2023 (arXiv:2302.06675).

        parameter <- parameter - lr (sign(b1 m + (1 - b1) g) + weight_decay parameter)
        m <- b2 m + (1 - b2) g
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-4,
                 betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            self._update()
        return loss

    def _update(self) -> None:
        for group in self.param_groups:
            rate, (first, second) = float(group["lr"]), group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                moment, gradient = state["exp_avg"], parameter.grad
                parameter.mul_(1 - rate * group["weight_decay"])
                direction = torch.lerp(gradient, moment, first).sign_()
                parameter.add_(direction, alpha=-rate)
                moment.lerp_(gradient, 1 - second)


def make_optimizer(request: Request, learning_rate: float, weight_decay: float
                   ) -> Callable[[Any], torch.optim.Optimizer]:
    """What makes the optimizer that `request` names, fused where it asks for that."""
    rate: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay}
    fused = {"fused": True} if request.fused_optimizer else {"foreach": False}
    if request.optimizer == "adamw":
        return lambda parameters: torch.optim.AdamW(parameters, **rate, **fused)
    if request.optimizer == "lion":
        return lambda parameters: Lion(parameters, **rate)
    momentum = MOMENTUM if request.optimizer == "sgd-momentum" else 0.0
    return lambda parameters: torch.optim.SGD(parameters, momentum=momentum, **rate, **fused)


def make_rate(schedule: LrSchedule, warmup: int, steps: int, floor: float) -> Rate:
    """Linear warm-up over `warmup` steps, then constant, or down to `floor` at step `steps`."""
    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        falling = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return floor + (1 - floor) * falling
    return rate
