"""A model running under a layout: one call a step, one global batch a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from executor.clock import Clock
from executor.data_parallel import compute_dtype, is_wrapped, prepare_micro_batch
from executor.flow import find_flow
from executor.fused import deinterleaved
from executor.gradients import clip, finish_partial, global_norm
from executor.legality import stage_of_layers
from executor.losses import Loss
from executor.mesh import ParallelMesh
from executor.pipeline import SharedParameter, build_schedule, share_gradients
from executor.random_state import RandomStreams
from executor.stage import TARGETS, Cut, StageModule, pack_inputs, unpack_inputs
from executor.tensor_parallel import TensorParallel
from planner.layout import Layout
from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph

if TYPE_CHECKING:
    from executor.checkpoint import Saving

__all__ = ["Run"]

Inputs = Any
"""A tensor, a tuple of tensors or a dict of tensors, each with the batch as its dim 0."""


@dataclass(slots=True)
class Run:
    """Made by `parallelize`. `stages` are this rank's, by stage number.

    names: the name of every parameter place -> the first name of that parameter. max_norm:
    gradients are clipped to this global norm; None: they are not.
    """

    layout: Layout
    graph: LayerGraph
    mesh: ParallelMesh
    loss: Loss
    stages: dict[int, StageModule]
    names: dict[str, str]
    shared: list[SharedParameter]
    random: RandomStreams
    tensor_parallel: TensorParallel | None
    skeleton: nn.Module | None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    max_norm: float | None = None
    seed: int = 0
    num_steps: int = 0
    grad_norm: float = float("nan")
    clock: Clock = field(init=False)
    _schedules: dict[Any, tuple[Any, dict[int, Cut]]] = field(default_factory=dict)
    _saving: Saving | None = None
    _background: Any = None

    def __post_init__(self) -> None:
        self.clock = Clock(self.mesh.device)

    # ---- parameters ----

    def named_parameters(self) -> Iterator[tuple[str, int, nn.Parameter]]:
        """(name, stage, parameter) of all that this rank holds; a shared one by its first name."""
        for number, stage in self.stages.items():
            for name, parameter in stage.named_own_parameters():
                yield self.names[name], number, parameter

    def own_parameters(self) -> list[nn.Parameter]:
        """This rank's parameters; of one that stages share, the copy of its first stage."""
        first = {item.name: item.stages[0] for item in self.shared}
        return [p for name, stage, p in self.named_parameters() if first.get(name, stage) == stage]

    def whole(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter-shaped tensor, in the model's own order. Collective."""
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        fused = self.fused_of(parameter)
        if fused is not None:
            full = deinterleaved(full, *fused, self.layout.mesh.tp)
        return full

    def fused_of(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """(dim, matrices) of a parameter whose shards are interleaved."""
        return getattr(parameter, "meshwright_fused", None)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients of this rank's stages, by first name. Collective."""
        return {name: self.whole(p, p.grad) for name, _, p in self.named_parameters()
                if p.grad is not None}

    # ---- a step ----

    def step(self, inputs: Inputs, targets: torch.Tensor) -> float:
        """Train on one global batch and return its loss, the mean over the whole batch.

        inputs, targets: the global batch (each rank takes its share), or this rank's share of it.

        Raises:
            InvalidInput: a batch of another size than the layout's, or without a single term of
                loss.
        """
        if self.optimizer is None:
            raise InvalidInput("step updates parameters: give parallelize an optimizer")
        # anew each step, so that a resumed run draws what it would have drawn
        self.random.seed(self.seed, self.num_steps)
        loss = self.forward_backward(inputs, targets)
        self.update()
        return loss

    def forward_backward(self, inputs: Inputs, targets: torch.Tensor) -> float:
        """Loss and gradients of one global batch: reduced, neither clipped nor applied."""
        packed, targets = self._share(pack_inputs(inputs), targets)
        count = self._global_count(targets)
        # FSDP2 averages over the data-parallel ranks: what is wanted is the sum
        wrapped = is_wrapped(next(iter(self.stages.values())))
        weight = (self.layout.mesh.dp if wrapped else 1) / count
        for stage in self.stages.values():
            stage.weight = weight
        with loss_parallel():
            total = (self._pipeline if self.layout.mesh.pp > 1 else self._accumulate)(
                packed, targets)
        self._finish_gradients()
        total = self.mesh.all_reduce_pp(self.mesh.all_reduce_dp(total.double()))
        return float(total) / (self.layout.mesh.dp if wrapped else 1)

    def update(self) -> None:
        """Clip, update, forget the gradients."""
        assert self.optimizer is not None
        own = self.own_parameters()
        norm = global_norm([p.grad for p in own if p.grad is not None], self.mesh)
        self.grad_norm = float(norm)
        if self.max_norm is not None:
            clip([p for _, _, p in self.named_parameters()], norm, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        self.num_steps += 1

    def _share(self, packed: dict[str, torch.Tensor], targets: torch.Tensor
               ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """This rank's samples, on its device."""
        batch, dp = self.layout.request.global_batch, self.layout.mesh.dp
        mine = batch // dp
        tensors = {**packed, TARGETS: targets}
        wrong = {k: tuple(v.shape) for k, v in tensors.items()
                 if v.dim() == 0 or v.shape[0] not in (batch, mine)}
        if wrong or len({v.shape[0] for v in tensors.values()}) != 1:
            shapes = {k: tuple(v.shape) for k, v in tensors.items()}
            raise InvalidInput(f"dim 0 of inputs and targets must be the global batch {batch}, or "
                               f"this "
                               f"rank's {mine} of it, alike for all: got {shapes}")
        tp, length = self.layout.mesh.tp, next(iter(packed.values())).shape
        if tp > 1 and (len(length) < 2 or length[1] % tp):
            raise InvalidInput(f"sequences must be divisible by tp {tp}, got inputs "
                               f"{tuple(length)}")
        if targets.shape[0] != mine:
            start = self.mesh.dp_rank * mine
            tensors = {k: v[start:start + mine] for k, v in tensors.items()}
        tensors = {k: v.to(self.mesh.device, non_blocking=True) for k, v in tensors.items()}
        targets = tensors.pop(TARGETS)
        return tensors, targets

    def _global_count(self, targets: torch.Tensor) -> float:
        count = torch.tensor(float(self.loss.count(targets)), dtype=torch.float64,
                             device=self.mesh.device)
        total = float(self.mesh.all_reduce_dp(count))
        if total <= 0:
            raise InvalidInput("the batch holds no term of loss (every target is ignored)")
        return total

    def _accumulate(self, packed: dict[str, torch.Tensor], targets: torch.Tensor
                    ) -> torch.Tensor:
        """Micro-batches one after the other, without a pipeline."""
        stage = self.stages[0]
        count = self.layout.num_micro_batches
        sync_each = self.layout.schedule.gradient_sync == "each_micro_batch"
        total = torch.zeros((), device=self.mesh.device)
        for number in range(count):
            prepare_micro_batch(stage, stage.layers, self.mesh, is_last=number == count - 1,
                                sync_each=sync_each)
            rows = slice(number * self.layout.micro_batch, (number + 1) * self.layout.micro_batch)
            with self.clock.span(0, "forward"):
                loss = stage(**{k: v[rows] for k, v in packed.items()},
                             **{TARGETS: targets[rows]})
            with self.clock.span(0, "backward"):
                loss.backward()
            total = total + loss.detach()
        return total

    def _pipeline(self, packed: dict[str, torch.Tensor], targets: torch.Tensor
                  ) -> torch.Tensor:
        """Micro-batches through the pipeline; the loss is on its last rank, zero elsewhere."""
        schedule = self._connect({k: v[:self.layout.micro_batch] for k, v in packed.items()})
        losses: list[torch.Tensor] = []
        last = len(self.layout.stages) - 1
        extra = {TARGETS: targets} if last in self.stages else {}
        schedule.step(target=targets, losses=losses, return_outputs=False,
                            **packed, **extra)
        if not losses:
            return torch.zeros((), device=self.mesh.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _connect(self, micro_batch: dict[str, torch.Tensor]) -> Any:
        """Learn what crosses each cut, and make the schedule: anew for inputs of other shapes,
        since torch's stages have buffers of fixed shapes."""
        shapes = tuple((name, t.shape, t.dtype) for name, t in sorted(micro_batch.items()))
        if shapes not in self._schedules:
            self._schedules[shapes] = self._make_schedule(micro_batch)
        schedule, cuts = self._schedules[shapes]
        for number, stage in self.stages.items():
            stage.cut = cuts[number]
        return schedule

    def _make_schedule(self, micro_batch: dict[str, torch.Tensor]) -> tuple[Any, dict[int, Cut]]:
        assert self.skeleton is not None
        args, kwargs = unpack_inputs(micro_batch)
        names = [layer.name for layer in self.graph.layers]
        flow = find_flow(self.skeleton, names, args, kwargs,
                         compute_dtype(self.layout.request.bytes))
        stage_of, count = stage_of_layers(self.layout), len(self.layout.stages)
        carried = flow.carried(stage_of, count)
        cuts = {number: Cut(flow=flow, stage_of=stage_of,
                            received=carried[number - 1] if number else (),
                            sent=carried[number] if number < count - 1 else ())
                for number in self.stages}
        return (build_schedule(self.layout, self.mesh, flow, carried, self.stages, self.clock),
                cuts)

    def _finish_gradients(self) -> None:
        finish_partial(p for _, _, p in self.named_parameters())
        if self.shared:
            copies: dict[str, list[nn.Parameter]] = {}
            for name, _, parameter in self.named_parameters():
                copies.setdefault(name, []).append(parameter)
            share_gradients(self.shared, copies)

    # ---- checkpoints ----

    def save(self, path: str | Path, *, asynchronous: bool = False, **position: Any) -> None:
        """Save parameters, optimizer and position as `<path>/step-<number>`. Collective.

        asynchronous: training may go on while the checkpoint is written from a copy; it counts
            once it is whole. `wait_for_save` says when, and so does the next save, which waits.
        position: what `load` is to return, as JSON.

        Raises:
            InvalidInput: the folder cannot be written.
        """
        from executor.checkpoint import save

        self.wait_for_save()
        self._saving = save(self, path, position, asynchronous)
        if not asynchronous:
            self.wait_for_save()

    def wait_for_save(self) -> None:
        """Return when the last checkpoint is on disk; raises what went wrong with it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def background_group(self) -> dist.ProcessGroup:
        """The group over which checkpoints are coordinated while training goes on."""
        if self._background is None:
            self._background = dist.new_group(backend="gloo")
        return self._background

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load what `save` saved, under whatever layout; returns the position it was given."""
        from executor.checkpoint import load

        return load(self, path)
