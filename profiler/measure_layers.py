"""Seconds and bytes of one distinct layer call, forward and backward, with each recompute."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from profiler.local_parameters import local_tensor
from profiler.memory_meter import MemoryMeter
from profiler.profile import SavedTensor
from profiler.recompute import recomputed
from profiler.timing import Budget, Clock, Samples, repeat_until_settled

__all__ = ["MODES", "Bytes", "Work", "saved_tensors", "work_bytes", "work_seconds"]

MODES = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Work:
    """A layer with its arguments. make_arguments: fresh leaves each time."""

    module: nn.Module
    make_arguments: Callable[[], tuple[Any, Any]]
    forward: Callable[..., Any]

    def run(self, mode: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The results that have a gradient."""
        out = recomputed(mode, self.forward)(*args, **kwargs)
        return [t for t in pytree.tree_leaves(out)
                if isinstance(t, torch.Tensor) and t.requires_grad]

    def forget_gradients(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None


@dataclass(slots=True)
class _Seeds:
    """Gradients of the results, made once."""

    made: list[torch.Tensor] = field(default_factory=list)

    def of(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self.made:
            self.made = [torch.randn_like(t).mul_(1e-3) for t in results]
        return self.made


def work_seconds(work: Work, clock: Clock, budget: Budget, agree: Callable[[bool], bool],
                 modes: tuple[str, ...] = MODES) -> tuple[Samples, bool]:
    """Repeats of every mode in turn, so that what disturbs one disturbs all.

    Parts are "forward" and "backward" (of mode none), "backward_selective", "backward_full",
    "accumulate": adding the new gradients to earlier ones, as autograd does, and "wall": what a
    clock on the wall says of forward and backward.
    """
    seeds = _Seeds()
    earlier: list[torch.Tensor] = []

    def once() -> dict[str, float]:
        found: dict[str, float] = {}
        for mode in modes:
            forward, backward, wall = _pass(work, mode, clock, seeds)
            if mode == "none":
                found |= {"forward": forward, "backward": backward, "wall": wall}
                found["accumulate"] = _accumulate(work, clock, earlier)
            else:
                found[f"backward_{mode}"] = backward
            work.forget_gradients()
        return found

    with _collector_off():
        return repeat_until_settled(once, ("forward", "backward"), budget, agree)


@contextmanager
def _collector_off() -> Iterator[None]:
    """A collection in the middle of a repeat would be counted as the layer's."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _pass(work: Work, mode: str, clock: Clock, seeds: _Seeds) -> tuple[float, float, float]:
    args, kwargs = work.make_arguments()
    clock.flush()
    _touch(args, kwargs)
    begin, wall_begin = clock.start(), time.perf_counter()
    results = work.run(mode, args, kwargs)
    end, wall = clock.mark(), time.perf_counter() - wall_begin
    if not results:
        return clock.between(begin, end), 0.0, wall
    grads = seeds.of(results)
    clock.flush()
    for grad in grads:
        grad.sum()
    begin_backward, wall_begin = clock.start(), time.perf_counter()
    torch.autograd.backward(results, grads)
    end_backward, wall = clock.mark(), wall + time.perf_counter() - wall_begin
    return clock.between(begin, end), clock.between(begin_backward, end_backward), wall


def _accumulate(work: Work, clock: Clock, earlier: list[torch.Tensor]) -> float:
    """Seconds of adding the gradients of the layer to `earlier`, those of the first call."""
    made = [p.grad for p in work.module.parameters() if p.grad is not None]
    if not earlier:
        earlier.extend(made)
    begin = clock.start()
    for total, grad in zip(earlier, made, strict=True):
        total.add_(grad)
    end = clock.mark()
    return clock.between(begin, end)


def _touch(args: Any, kwargs: Any) -> None:
    """What the layer before has just written is in the caches."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point:
            leaf.detach().sum()


def saved_tensors(work: Work) -> list[SavedTensor]:
    """What autograd keeps of a forward, each storage once, parameters excluded, by module.

    Tensors of no dimension are left out, as in the LayerGraph: a few bytes of statistics.
    """
    stack = [""]
    sizes: dict[str, int] = {}
    seen = {local_tensor(p).untyped_storage()._cdata for p in work.module.parameters()}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.dim() > 0 and storage._cdata not in seen:
            seen.add(storage._cdata)
            kept.append(tensor)  # alive: another must not get its address
            sizes[stack[-1]] = sizes.get(stack[-1], 0) + storage.nbytes()
        return tensor

    hooks = []
    for name, inner in work.module.named_modules():
        hooks.append(inner.register_forward_pre_hook(
            lambda module, args, name=name: stack.append(name)))
        hooks.append(inner.register_forward_hook(
            lambda module, args, out: (stack.pop(), None)[1]))
    args, kwargs = work.make_arguments()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = work.module(*args, **kwargs)
        del out
    finally:
        for hook in hooks:
            hook.remove()
    return [SavedTensor(name=name or "itself", num_bytes=size) for name, size in sizes.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """See `LayerBytes`."""

    saved: list[SavedTensor]
    kept: dict[str, int]
    forward_peak_bytes: int
    backward_peak_bytes: int


def work_bytes(work: Work, device: torch.device) -> Bytes:
    """What a layer allocates, by the allocator's own account."""
    work.forget_gradients()
    kept: dict[str, int] = {}
    peaks: list[int] = []
    for mode in MODES:
        args, kwargs = work.make_arguments()
        meter = MemoryMeter(device)
        with meter:
            results = work.run(mode, args, kwargs)
            nodes = [t.grad_fn for t in results]
            grads = [torch.empty_like(t) for t in results] if mode == "none" else []
            made = sum(t.untyped_storage().nbytes() for t in grads)
            del results
        kept[mode] = meter.left_bytes - made
        if mode == "none":
            peaks.append(meter.peak_bytes - made)
        del nodes, grads, args, kwargs
    args, kwargs = work.make_arguments()
    results = work.run("none", args, kwargs)
    end = _Incoming.apply(*results) if results else None
    hooks = [p.register_post_accumulate_grad_hook(_forget) for p in work.module.parameters()
             if p.requires_grad]
    del results
    meter = MemoryMeter(device)
    with meter:
        if end is not None:
            end.backward()
    for hook in hooks:
        hook.remove()
    return Bytes(saved=saved_tensors(work), kept=kept, forward_peak_bytes=peaks[0],
                 backward_peak_bytes=kept["none"] + max(0, meter.peak_bytes))


class _Incoming(torch.autograd.Function):  # type: ignore[misc]
    """Stands for the layers that follow: its backward makes the gradients of the results."""

    @staticmethod
    def forward(ctx: Any, *results: torch.Tensor) -> torch.Tensor:
        ctx.like = [(t.shape, t.dtype) for t in results]
        return results[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.full(shape, 1e-3, dtype=dtype, device=grad.device)
                     for shape, dtype in ctx.like)


def _forget(parameter: torch.Tensor) -> None:
    """A parameter's gradient is counted with the gradients, but for the moment it is made in."""
    parameter.grad = None
