"""One pipeline stage: the whole model's own forward, with only this stage's layers computed.

Layers of other stages return the tensors that were received in their place, or placeholders where
nobody needs the values here. A model that is not cut is a single stage, and nothing is replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication

from executor.flow import Flow, TensorSpec
from executor.losses import Loss, prediction_of, whole
from executor.tensor_parallel import TensorParallel
from planner.layout import Choice
from profiler.errors import InternalError
from profiler.layer_calls import LayerCalls, layer_modules
from profiler.placeholder import Placeholder, Source, placeholders_in
from profiler.recompute import recomputed

__all__ = ["Cut", "StageModule", "copy_with", "drop_parameters", "pack_inputs", "unpack_inputs"]

TARGETS = "meshwright_targets"
"""Keyword under which the last stage gets targets."""

_POSITIONAL = "meshwright_input_"


def pack_inputs(inputs: Any) -> dict[str, torch.Tensor]:
    """A tensor, tuple or dict of tensors as keyword arguments of a stage."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, (tuple, list)):
        return {f"{_POSITIONAL}{number}": tensor for number, tensor in enumerate(inputs)}
    return dict(inputs)


def unpack_inputs(packed: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the model's forward."""
    args = tuple(v for k, v in packed.items() if k.startswith(_POSITIONAL))
    return args, {k: v for k, v in packed.items() if not k.startswith(_POSITIONAL)}


def copy_with(model: nn.Module, parameters: Callable[[nn.Parameter], nn.Parameter | None]
              ) -> nn.Module:
    """A copy of the module tree whose parameters are `parameters(original)`, or absent."""
    memo: dict[int, Any] = {id(p): parameters(p) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def drop_parameters(model: nn.Module, original: nn.Module, kept: Sequence[nn.Module]) -> None:
    """Leave only the parameters of `kept` (modules of `model`, a copy of `original`) in `model`.

    A shared parameter is dropped from the places outside `kept`: two places would be torn apart by
    FSDP2.
    """
    inside = {id(inner) for module in kept for inner in module.modules()}
    for module, before in zip(model.modules(), original.modules(), strict=True):
        if id(module) in inside:
            continue
        for name, parameter in before._parameters.items():
            if parameter is not None:
                module._parameters[name] = None
                # glue may ask an absent parameter for its dtype or shape: one element shows them
                vars(module)[name] = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a stage stands in the pipeline, and what crosses its borders."""

    flow: Flow
    stage_of: dict[int, int]
    received: tuple[Source, ...]
    sent: tuple[Source, ...]


class _StageDone(Exception):
    """All that a stage sends is there: what its model's forward would go on to do is not needed."""


class StageModule(nn.Module):  # type: ignore[misc]
    """Runs one stage. Its forward returns the tensors to send, or (last) the weighted loss."""

    def __init__(self, model: nn.Module, names: Sequence[str], choices: dict[int, Choice], *,
                 loss: Loss, is_last: bool, tensor_parallel: TensorParallel | None,
                 input_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.choices = choices
        self._last_own = max(choices)
        self.is_last = is_last
        self.weight = 1.0
        self.cut: Cut | None = None
        self._loss, self._tp = loss, tensor_parallel
        self._input_dtype = input_dtype
        self._received: dict[Source, torch.Tensor] = {}
        self._produced: dict[Source, Any] = {}
        modules = layer_modules(model, names)
        self.layers = [(modules[index], choice) for index, choice in choices.items()]
        self._in_layers = {id(inner) for module in modules for inner in module.modules()}
        self._calls = LayerCalls(model, names, self._handle)
        self._places: list[tuple[str, nn.Module, str]] | None = None

    def named_own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `model.named_parameters()`, which walks the whole model, most of it without any."""
        if self._places is None:
            modules = dict(self.model.named_modules())
            paths = [name.rpartition(".") for name, _ in self.model.named_parameters()]
            self._places = [(f"{path}{dot}{key}", modules[path], key) for path, dot, key in paths]
        for name, module, key in self._places:
            yield name, module._parameters[key]

    def named_own_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Persistent buffers of this stage's layers, and of what is outside of all layers."""
        own = {id(inner) for module, _ in self.layers for inner in module.modules()}
        for path, module in self.model.named_modules():
            if id(module) in own or id(module) not in self._in_layers:
                for key, buffer in module._buffers.items():
                    if buffer is not None and key not in module._non_persistent_buffers_set:
                        yield f"{path}.{key}".lstrip("."), buffer

    def forward(self, *received: torch.Tensor, **packed: Any) -> Any:
        targets = packed.pop(TARGETS, None)
        self._calls.begin()
        self._produced = {}
        if self.cut is not None:
            self._received = dict(zip(self.cut.received, received, strict=True))
        if self._input_dtype is not None:
            packed = {k: v.to(self._input_dtype) if v.is_floating_point() else v
                      for k, v in packed.items()}
        args, kwargs = unpack_inputs(packed)
        if self._tp is not None:
            first = next(iter(packed.values()))
            self._tp.begin(first.shape[1])
        with implicit_replication() if self._tp is not None else nullcontext():
            try:
                result = self.model(*args, **kwargs)
            except _StageDone:
                return self._to_send()
            prediction = prediction_of(result)
            if isinstance(prediction, Placeholder):
                raise InternalError(f"the last stage lacks what its result is made of: "
                                    f"{prediction}")
            if not self._loss.divided:
                prediction = whole(prediction)
            return self._loss.total(prediction, targets) * self.weight

    def _to_send(self) -> tuple[torch.Tensor, ...]:
        assert self.cut is not None
        tensors = []
        for source in self.cut.sent:
            tensor = self._produced.get(source, self._received.get(source))
            if tensor is None:
                raise InternalError(f"layer {source[0]} was not run, though its output is to be "
                                    f"sent")
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            tensors.append(local.contiguous())  # what is sent must be
        return tuple(tensors)

    def _handle(self, index: int, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if index not in self.choices:
            if index > self._last_own and not self.is_last:
                raise _StageDone
            return self._elsewhere(index)
        dead = placeholders_in((args, kwargs))
        if dead:
            raise InternalError(f"layer {index} reads {dead[0]}, which was not carried to its "
                                f"stage")
        if self._tp is None:
            out = recomputed(self.choices[index].recompute, forward)(*args, **kwargs)
        else:
            inner = recomputed(self.choices[index].recompute, forward)
            out = self._tp.run(index, inner, args, kwargs)
        if self.cut is not None:
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(out)
                       if isinstance(leaf, torch.Tensor)]
            self._produced |= {(index, j): t for j, t in enumerate(tensors)}
        return out

    def _elsewhere(self, index: int) -> Any:
        """The result of a layer that another stage computes."""
        assert self.cut is not None
        output = self.cut.flow.outputs[index]
        return output.build([self._stand_in((index, j), spec)
                             for j, spec in enumerate(output.tensors())])

    def _stand_in(self, source: Source, spec: TensorSpec) -> Any:
        tensor = self._received.get(source)
        if tensor is None:
            meta = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            device = next((t.device for t in self._received.values()), torch.device("cpu"))
            return Placeholder(meta, device, frozenset({source}), spec.differentiable)
        if self._tp is not None and is_sequence(spec):
            return DTensor.from_local(tensor, self._tp.mesh, [Shard(1)], run_check=False)
        return tensor


def is_sequence(spec: TensorSpec) -> bool:
    """Whether an activation is sharded by sequence between layers under tensor parallelism."""
    return len(spec.shape) > 1 and spec.dtype.is_floating_point
