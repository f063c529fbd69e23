"""Which calls of its layers a model makes: each distinct one is run once, with real arguments.

The frame's forward runs as it is, and so does all that stands between layers. A layer that is new
(by signature of the module and its arguments) is made real, run, and forgotten; one that is
known returns what the first returned. So a model of any depth needs the memory of its largest
layer, and of its activations at one cut.

Work between layers is timed on a second pass, in which every layer returns at once:

    after layer j, until the next is called        forward, belongs to layer j
    from the last gradient until layer j's comes   backward, belongs to layer j

and what comes before the first layer belongs to the first, as in the LayerGraph.

Every stage of a pipeline runs the model's own forward again, up to its first layer, with
placeholders for what other stages compute: `time_frame`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from profiler.building import Subject, materialise
from profiler.errors import InvalidInput
from profiler.layer_calls import LayerCalls
from profiler.placeholder import Placeholder
from profiler.timing import Clock, Samples
from profiler.trace_partition import signature, tensor_signature
from profiler.trace_run import seeds_of

__all__ = ["Call", "Calls", "capture", "time_frame", "time_outside"]


@dataclass(frozen=True, slots=True)
class Call:
    """A distinct call: the first layer that makes it, its arguments and its result, detached."""

    layer: int
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def fresh_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as leaves of a new graph."""
        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.detach().requires_grad_(value.requires_grad)
        fresh: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            leaf, (self.args, self.kwargs))
        return fresh


@dataclass(slots=True)
class Calls:
    """The distinct calls of one size, and which of them each layer makes."""

    distinct: list[Call] = field(default_factory=list)
    of_layer: dict[int, int] = field(default_factory=dict)


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def capture(subject: Subject, micro_batch: int, seq_len: int) -> Calls:
    """Run the model once and write down its distinct calls."""
    calls = Calls()
    known: dict[Any, int] = {}
    signatures: dict[int, Any] = {}

    def handle(index: int, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if id(module) not in signatures:
            signatures[id(module)] = signature(module)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (signatures[id(module)], str(spec), tuple(
            tensor_signature(leaf) if isinstance(leaf, torch.Tensor) else
            leaf if isinstance(leaf, (bool, int, float, str)) else id(leaf) for leaf in leaves))
        number = known.setdefault(key, len(calls.distinct))
        calls.of_layer[index] = number
        if number == len(calls.distinct):
            real = materialise(module, subject.device)
            result = real(*args, **kwargs)
            kept_args, kept_kwargs = pytree.tree_map(_detached, (args, kwargs))
            calls.distinct.append(Call(index, module, kept_args, kept_kwargs,
                                       pytree.tree_map(_detached, result)))
        return _returned(calls.distinct[number].result, lambda layer: None, index, {}, anchor,
                         (args, kwargs))

    anchor = torch.zeros((), device=subject.device, requires_grad=True)
    args, kwargs = subject.make_inputs(micro_batch, seq_len)
    with LayerCalls.intercept(subject.model, subject.names, handle):
        subject.model(*args, **kwargs)
    missing = [name for index, name in enumerate(subject.names) if index not in calls.of_layer]
    if missing:
        raise InvalidInput(f"the model's forward does not call {', '.join(missing[:5])}, which the "
                           "LayerGraph has: it is not the one that was traced")
    return calls


class _Boundary(torch.autograd.Function):  # type: ignore[misc]
    """A layer that takes no time: gives its result, and gradients of the arguments."""

    @staticmethod
    def forward(ctx: Any, visit: Callable[[int], None], layer: int, made: Sequence[torch.Tensor],
                grads: dict[Any, torch.Tensor], anchor: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.visit, ctx.layer, ctx.grads = visit, layer, grads
        ctx.specs = [(t.shape, t.dtype, t.device) for t in inputs]
        outputs = tuple(tensor.detach() for tensor in made)
        ctx.mark_non_differentiable(*(
            out for out, tensor in zip(outputs, made, strict=True) if not tensor.requires_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        ctx.visit(ctx.layer)
        made = []
        for spec, needed in zip(ctx.specs, ctx.needs_input_grad[5:], strict=True):
            if needed and spec not in ctx.grads:
                shape, dtype, device = spec
                ctx.grads[spec] = torch.full(shape, 1e-3, dtype=dtype, device=device)
            made.append(ctx.grads[spec] if needed else None)
        ctx.visit(ctx.layer)
        return (None, None, None, None, None, *made)


def _returned(result: Any, visit: Callable[[int], None], layer: int,
              grads: dict[Any, torch.Tensor], anchor: torch.Tensor, arguments: Any) -> Any:
    """A recorded result as the layer's output, which code between layers may change in place."""
    leaves, spec = pytree.tree_flatten(result)
    wanted = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
              and leaf.dtype.is_floating_point]
    inputs = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    made = _Boundary.apply(visit, layer, [leaves[k] for k in wanted], grads, anchor, *inputs)
    for k, tensor in zip(wanted, made, strict=True):
        leaves[k] = tensor
    return pytree.tree_unflatten(leaves, spec)


@dataclass(slots=True)
class _Moments:
    """Moments of one pass, with the layer at each."""

    clock: Clock
    forward: list[tuple[int, Any]] = field(default_factory=list)
    backward: list[tuple[int, Any]] = field(default_factory=list)

    def visit_forward(self, layer: int) -> None:
        self.forward.append((layer, self.clock.mark()))

    def visit_backward(self, layer: int) -> None:
        self.backward.append((layer, self.clock.mark()))

    def seconds(self) -> dict[int, list[float]]:
        """[forward, backward] seconds of the work that belongs to each layer."""
        found: dict[int, list[float]] = {}
        for part, moments in enumerate((self.forward, self.backward)):
            for (before, begin), (after, end) in zip(moments[::2], moments[1::2], strict=True):
                owner = before if part == 0 else after
                row = found.setdefault(owner, [0.0, 0.0])
                row[part] += self.clock.between(begin, end)
        return found


def time_outside(subject: Subject, micro_batch: int, seq_len: int,
                 results: dict[int, Any], clock: Clock, repeats: int, *, degree: int = 1,
                 bound: int | None = None) -> dict[int, Samples]:
    """Seconds of the work outside layers, by the layer that it belongs to.

    results: what each layer returns. degree: into how many parts the sequence is divided between
        layers. bound: labels are drawn below it (a part of a vocabulary).
    """
    samples: dict[int, Samples] = {}
    grads: dict[Any, torch.Tensor] = {}
    args, kwargs = _inputs(subject, micro_batch, seq_len, degree, bound)
    with _vocabulary(subject.model, bound):
        for number in range(repeats + 1):
            moments = _outside_once(subject, args, kwargs, results, clock, grads)
            if number == 0:
                continue  # a warm-up
            for layer, (forward, backward) in moments.seconds().items():
                samples.setdefault(layer, Samples()).add(forward=forward, backward=backward)
    return samples


def _inputs(subject: Subject, micro_batch: int, seq_len: int, degree: int, bound: int | None
            ) -> tuple[Any, Any]:
    args, kwargs = subject.make_inputs(micro_batch, seq_len)
    if bound is not None and "labels" in kwargs:
        kwargs["labels"] = kwargs["labels"] % bound
    if degree > 1 and "input_ids" in kwargs:  # code between layers takes the length from them
        kwargs["input_ids"] = kwargs["input_ids"].narrow(1, 0, seq_len // degree)
    return args, kwargs


class _Reached(Exception):
    """The first layer of a stage is called."""


def time_frame(subject: Subject, micro_batch: int, seq_len: int, results: dict[int, Any],
               clock: Clock, repeats: int, *, degree: int = 1, bound: int | None = None
               ) -> Samples | None:
    """Seconds of the model's forward up to the first layer of a stage in the middle of the model,
    as "forward"; None for a model of one layer. Arguments as of `time_outside`.

    Raises:
        UnsupportedLayout: the model cannot be cut into stages.
    """
    first = len(subject.names) // 2
    if first == 0:
        return None

    def handle(index: int, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if index == first:
            raise _Reached
        return pytree.tree_map(
            functools.partial(_stand_in, index) if index < first - 1 else _detached,
            results[index])

    samples = Samples()
    args, kwargs = _inputs(subject, micro_batch, seq_len, degree, bound)
    with _vocabulary(subject.model, bound), LayerCalls(
            subject.model, subject.names, handle).kept() as calls:
        for number in range(repeats + 1):
            calls.begin()
            clock.flush()  # the layers of a step do: it takes two to three times as long as without
            begin = clock.mark()
            with suppress(_Reached):
                subject.model(*args, **kwargs)
            end = clock.mark()
            if number:  # the first is a warm-up
                samples.add(forward=clock.between(begin, end))
    return samples


def _stand_in(layer: int, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return Placeholder(meta, value.device, frozenset({(layer, 0)}), value.requires_grad)


@contextmanager
def _vocabulary(model: nn.Module, bound: int | None) -> Iterator[None]:
    """Hugging Face models lay out logits by the vocabulary that they think they have."""
    changed: list[tuple[Any, int]] = []
    owner: Any
    for owner in (model, getattr(model, "config", None)):
        whole = getattr(owner, "vocab_size", None)
        if bound is not None and isinstance(whole, int):
            changed.append((owner, whole))
            owner.vocab_size = bound
    try:
        yield
    finally:
        for owner, whole in changed:
            owner.vocab_size = whole


def _outside_once(subject: Subject, args: Any, kwargs: Any, results: dict[int, Any], clock: Clock,
                  grads: dict[Any, torch.Tensor]) -> _Moments:
    moments = _Moments(clock)
    anchor = torch.zeros((), device=subject.device, requires_grad=True)

    def handle(index: int, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        moments.visit_forward(index)
        result = _returned(results[index], moments.visit_backward, index, grads, anchor,
                           (args, kwargs))
        moments.visit_forward(index)
        return result

    first = 0
    moments.visit_forward(first)
    with LayerCalls.intercept(subject.model, subject.names, handle):
        out = subject.model(*args, **kwargs)
    last = moments.forward[-1][0]
    moments.visit_forward(last)
    seeds = seeds_of(out)
    del out
    made = [torch.full_like(t, 1e-3) if t.dim() else None for t in seeds]
    moments.visit_backward(last)
    if seeds:
        torch.autograd.backward(seeds, made)
    moments.visit_backward(first)
    for parameter in subject.model.parameters():
        parameter.grad = None
    return moments
