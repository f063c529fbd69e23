"""Pipelines by torch.distributed.pipelining: schedules, and parameters that stages share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor

from executor.clock import Clock
from executor.flow import Flow
from executor.mesh import ParallelMesh, coordinates, rank_at
from executor.stage import StageModule, is_sequence
from planner.layout import Layout
from profiler.placeholder import Source

__all__ = ["SharedParameter", "build_schedule", "local_stages", "share_gradients"]


def local_stages(layout: Layout, pipeline_rank: int) -> list[int]:
    """The stages that run on a pipeline rank: stage k runs on rank k mod pp."""
    return list(range(pipeline_rank, len(layout.stages), layout.mesh.pp))


def _examples(flow: Flow, sources: Sequence[Source], tp: int) -> tuple[list[Any], list[Any]]:
    """(tensors, gradients) as they cross a cut: shapes and types only."""
    tensors, gradients = [], []
    for source in sources:
        spec = flow.spec(source)
        shape = list(spec.shape)
        if tp > 1 and is_sequence(spec):
            shape[1] //= tp
        tensor = torch.empty(shape, dtype=spec.dtype, device="meta")
        tensors.append(tensor.requires_grad_(spec.differentiable))
        gradients.append(torch.empty_like(tensor, requires_grad=False)
                         if spec.differentiable else None)
    return tensors, gradients


def build_schedule(layout: Layout, mesh: ParallelMesh, flow: Flow,
                   carried: Sequence[tuple[Source, ...]], stages: dict[int, StageModule],
                   clock: Clock) -> Any:
    """The schedule that runs this rank's stages.

    The shapes of all that crosses a cut are given, so that torch does not run a micro-batch to
    learn them (which would draw random numbers and change statistics).
    """
    tp, last = layout.mesh.tp, len(layout.stages) - 1
    built = []
    for number, module in stages.items():
        inputs, input_grads = _examples(flow, carried[number - 1] if number else (), tp)
        outputs, output_grads = _examples(flow, carried[number] if number < last else (), tp)
        if number == last:
            outputs, output_grads = [torch.empty((), device="meta", requires_grad=True)], [None]
        stage: Any = PipelineStage(
            module, number, last + 1, mesh.device, input_args=tuple(inputs),
            output_args=tuple(outputs), input_grads=tuple(input_grads),
            output_grads=tuple(output_grads), group=mesh.group("pp"))
        stage.forward_one_chunk = clock.watch(number, "forward", stage.forward_one_chunk)
        stage.backward_one_chunk = clock.watch(number, "backward", stage.backward_one_chunk)
        built.append(stage)

    def loss_of(output: torch.Tensor, target: Any) -> torch.Tensor:
        return output  # the last stage's result is the loss

    count = layout.num_micro_batches
    if layout.schedule.name == "interleaved":
        return ScheduleInterleaved1F1B(built, count, loss_fn=loss_of, scale_grads=False)
    kind = ScheduleGPipe if layout.schedule.name == "gpipe" else Schedule1F1B
    return kind(built[0], count, loss_fn=loss_of, scale_grads=False)


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """One parameter of the model that several stages hold; `group` spans the ranks that do."""

    name: str
    stages: tuple[int, ...]
    group: dist.ProcessGroup | None

    @classmethod
    def build(cls, name: str, stages: tuple[int, ...], mesh: ParallelMesh) -> SharedParameter:
        """Every rank of the pipeline calls this for every shared parameter, in one order."""
        places = sorted({stage % mesh.spec.pp for stage in stages})
        group = None
        if len(places) > 1:
            # every rank makes every group: groups made by their members alone (torch's local
            # synchronization) are named by what each has made before, and may never meet
            peers = {tuple(rank_at(mesh.spec, **{**coordinates(mesh.spec, rank), "pp": place})
                           for place in places) for rank in range(mesh.spec.num_devices)}
            group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in sorted(peers)])
        return cls(name, stages, group)


def share_gradients(shared: Sequence[SharedParameter],
                    copies: dict[str, list[nn.Parameter]]) -> None:
    """Give every copy of a shared parameter the sum of the copies' gradients."""
    for item in shared:
        mine = [p for p in copies.get(item.name, ()) if p.requires_grad]
        if not mine:
            continue
        gradients = []
        for parameter in mine:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        if item.group is not None:
            dist.all_reduce(total, group=item.group)
        for gradient in gradients:
            gradient.copy_(total)
