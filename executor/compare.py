"""A run against one process: gradients in float64, then losses over some steps in float32.

Gradients are the judge: a loss can hide a wrong gradient for a long time. Differences are relative
to a parameter's largest gradient, floored at a millionth of the model's largest, since some
gradients are truly zero (a key bias under softmax).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from executor.float64 import float64
from executor.losses import Loss, prediction_of
from executor.parallelize import parallelize
from executor.run import Run
from executor.stage import pack_inputs, unpack_inputs
from planner.layout import Layout
from profiler.layer_graph import LayerGraph

__all__ = ["GRADIENT_LIMIT", "STEPS", "STEPS_LIMIT", "Comparison", "Problem", "compare"]

GRADIENT_LIMIT = 1e-10
"""Largest relative difference of a gradient in float64: right layouts reach 1e-15, faults 1e-3."""

STEPS, STEPS_LIMIT = 5, 1e-5
"""Steps of AdamW in float32, and the largest difference of their losses."""

FLOOR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model with one global batch. `model(dtype)` gives the same weights at every call."""

    model: Callable[[torch.dtype], nn.Module]
    inputs: Callable[[torch.dtype], Any]
    targets: Callable[[torch.dtype], torch.Tensor]
    loss: Loss
    max_norm: float | None = None
    learning_rate: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The worst over all ranks. num_missing: parameters with a gradient in one run only."""

    gradient: float
    where: str
    loss: float
    num_compared: int
    num_missing: int
    steps: float

    @property
    def passed(self) -> bool:
        return (self.gradient <= GRADIENT_LIMIT and self.loss <= GRADIENT_LIMIT
                and self.num_missing == 0 and self.num_compared > 0
                and self.steps <= STEPS_LIMIT)


def _call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = unpack_inputs(pack_inputs(inputs))
    return prediction_of(model(*args, **kwargs))


def _alone(problem: Problem, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process on the whole batch."""
    model, targets = problem.model(dtype), problem.targets(dtype)
    with float64():
        loss = problem.loss.total(_call(model, problem.inputs(dtype)), targets)
        loss = loss / problem.loss.count(targets)
        loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _alone_steps(problem: Problem) -> list[float]:
    model, losses = problem.model(torch.float32), []
    inputs, targets = problem.inputs(torch.float32), problem.targets(torch.float32)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=problem.learning_rate)
    for _ in range(STEPS):
        loss = problem.loss.total(_call(model, inputs), targets) / problem.loss.count(targets)
        loss.backward()
        if problem.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, problem.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(problem: Problem, layout: Layout, graph: LayerGraph,
            change: Callable[[Run], None] = lambda run: None) -> Comparison:
    """Run `layout` beside one process. Collective: every rank calls it and gets the same answer.

    change: applied to each run before it starts (tests break it here).
    """
    wanted, truth = _alone(problem, torch.float64)
    run = _run(problem, layout, graph, torch.float64)
    change(run)
    with float64():
        got = run.forward_backward(problem.inputs(torch.float64), problem.targets(torch.float64))
    gradients = run.gradients()
    scale = max(float(g.abs().max()) for g in truth.values())
    worst, where = 0.0, ""
    for name, gradient in gradients.items():
        if name not in truth:
            continue
        floor = max(float(truth[name].abs().max()), FLOOR * scale)
        error = float((gradient - truth[name]).abs().max()) / floor
        if not error <= worst:  # a NaN counts as the worst
            worst, where = error, name
    expected = {n for n, _, p in run.named_parameters() if p.requires_grad and n in truth}
    seen = {n for n in gradients if n in truth}
    steps = _difference_over_steps(problem, layout, graph, change)
    return _worst(Comparison(gradient=worst, where=where, loss=abs(got - wanted) / abs(wanted),
                             num_compared=len(seen), num_missing=len(expected - seen),
                             steps=steps), seen, set(truth))


def _difference_over_steps(problem: Problem, layout: Layout, graph: LayerGraph,
                           change: Callable[[Run], None]) -> float:
    run = _run(problem, layout, graph, torch.float32)
    change(run)
    inputs, targets = problem.inputs(torch.float32), problem.targets(torch.float32)
    losses = [run.step(inputs, targets) for _ in range(STEPS)]
    return max(abs(a - b) for a, b in zip(losses, _alone_steps(problem), strict=True))


def _run(problem: Problem, layout: Layout, graph: LayerGraph, dtype: torch.dtype) -> Run:
    return parallelize(problem.model(dtype), layout, loss=problem.loss, graph=graph,
                       device_type="cpu", max_norm=problem.max_norm,
                       optimizer=lambda ps: torch.optim.AdamW(ps, lr=problem.learning_rate))


def _worst(mine: Comparison, seen: set[str], truth: set[str]) -> Comparison:
    """Over all ranks; a gradient that no rank compared is missing too."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (mine, seen))
    nowhere = truth - set().union(*(names for _, names in every))
    comparisons = [comparison for comparison, _ in every]
    worst = max(comparisons, key=lambda c: c.gradient if c.gradient == c.gradient else float("inf"))
    return Comparison(
        gradient=worst.gradient, where=worst.where, loss=max(c.loss for c in comparisons),
        num_compared=len(truth) - len(nowhere),
        num_missing=sum(c.num_missing for c in comparisons) + len(nowhere),
        steps=max(c.steps for c in comparisons))
