"""A layer as rank 0 of a tensor-parallel group of t, on one device.

Parameters are cut as the LayerGraph says (`Parameter.split`), modules as `profiler/families.py`
knows, between divided matmuls under sequence parallelism: what the executor runs. Where there are
fewer KV heads than ranks, parameters of keys and values are whole, a part of them computes, and
their gradient is whole. Collectives take no time and move nothing; the local work beside them is
done:

    gather           the gathered tensor is read from a buffer of its size, and its pieces are put
                     in order (a copy, if the micro-batch has several samples)
    reduce-scatter   the pieces are put in order (a copy); the result is a buffer of its size

x_BSH is an activation; between layers it holds S/t of the sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from profiler.building import materialise
from profiler.families import FAMILIES, NORMS
from profiler.layer_graph import LayerKind, Parameter
from profiler.local_parameters import use_local_parameters

__all__ = ["CannotDivide", "Emulation", "HeldWhole", "divided", "local_arguments"]


class CannotDivide(Exception):
    """The layer cannot be measured as a shard; the message says why."""


class HeldWhole(CannotDivide):
    """Every rank computes the layer whole, and takes its part of the result."""


@dataclass(slots=True)
class Emulation:
    """Stands for a group of `degree` ranks, this being the first."""

    degree: int
    seq_len: int
    _buffers: dict[Any, torch.Tensor] = field(default_factory=dict)
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict)

    def mesh(self, device_type: str) -> DeviceMesh:
        """What DTensors of the group are over: nothing can be sent through it."""
        if device_type not in self._meshes:
            self._meshes[device_type] = DeviceMesh(device_type, torch.arange(self.degree),
                                                   _init_backend=False, _rank=0)
        return self._meshes[device_type]

    def _buffer(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """What a collective would have received: always the same memory."""
        key = (shape, like.dtype, like.device)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(shape, dtype=like.dtype,
                                             device=like.device).normal_(0.0, 0.02)
        return self._buffers[key].detach()

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S/t, ...) -> (B, S, ...)."""
        b, s, *rest = x.shape
        received = self._buffer(x, (self.degree * b, s, *rest))
        if b == 1:
            return received.view(1, s * self.degree, *rest)
        return torch.cat(received.chunk(self.degree, dim=0), dim=1)

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, ...) -> (B, S/t, ...)."""
        torch.cat(x.chunk(self.degree, dim=1), dim=0)
        b, s, *rest = x.shape
        return self._buffer(x, (b, s // self.degree, *rest))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather an activation if it is a shard of the sequence; gradients are scattered."""
        if x.shape[1] == self.seq_len:
            return x
        out: torch.Tensor = _Gather.apply(x, self)
        return out

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce and scatter an activation; gradients are gathered."""
        out: torch.Tensor = _Scatter.apply(x, self)
        return out


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Emulation) -> torch.Tensor:
        ctx.group = group
        return group.gathered(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.scattered(grad), None


class _Scatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Emulation) -> torch.Tensor:
        ctx.group = group
        return group.scattered(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.gathered(grad), None


def divided(module: nn.Module, kind: LayerKind, group: Emulation, device: torch.device, *,
            plain: bool = False) -> nn.Module:
    """A real copy of a layer of the frame with shards as its parameters.

    plain: they are no DTensors. torch.compile does not know a mesh without process groups, and
        leaves nothing of what DTensors cost.

    Raises:
        HeldWhole: there is nothing to divide.
        CannotDivide: a degree that does not fit, or a class whose code is not known to stand it.
    """
    splits = {p.name: p for p in kind.parameters if p.split != "replicated"}
    if not splits and not type(module).__name__.endswith(NORMS):
        raise HeldWhole("it costs what it costs at degree 1")
    _check_degree(kind, group.degree)
    _check_families(module, {name: s for name, s in splits.items() if s.split != "vocabulary"})
    cut = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    own = dict(cut.named_parameters(remove_duplicate=False))
    split_of = {id(own[name]): split for name, split in splits.items() if name in own}
    copies = kind.tensor_parallel.kv_copies(group.degree) if kind.tensor_parallel else 1
    shared = kind.tensor_parallel.kv_parameters if kind.tensor_parallel and copies > 1 else ()
    found: dict[str, dict[str, Parameter]] = {}
    sliced: dict[str, dict[str, int]] = {}
    for path, inner in cut.named_modules():
        for name, parameter in list(inner._parameters.items()):
            if parameter is not None and id(parameter) in split_of:
                split = split_of[id(parameter)]
                found.setdefault(path, {})[name] = split
                if split.name in shared:
                    sliced.setdefault(path, {})[name] = split.split_dim or 0
                else:
                    inner._parameters[name] = _shard(parameter, split.split_dim, group.degree)
    real = materialise(cut, device)
    for path, inner in list(real.named_modules()):
        if splits:
            _change(inner, found.get(path, {}), group, copies)
        slices = {name: (dim, group.degree // copies, 0)
                  for name, dim in sliced.get(path, {}).items()}
        if not plain:
            _distribute(inner, {name: split.split_dim for name, split in found.get(path, {}).items()
                                if name not in slices}, group)
        if slices or not plain:
            use_local_parameters(inner, Partial(), slices)
    return real


def _check_degree(kind: LayerKind, degree: int) -> None:
    split = kind.tensor_parallel
    wrong = [f"{name} {size}" for name, size in (split.divides if split else {}).items()
             if size % degree and name != "vocabulary" and not (
                 name == "kv_heads" and split and split.kv_parameters and degree % size == 0)]
    if wrong:
        raise CannotDivide(f"degree {degree} does not divide {', '.join(wrong)}")


def _check_families(module: nn.Module, splits: Mapping[str, Parameter]) -> None:
    modules, unknown = dict(module.named_modules()), set()
    for name in splits:
        owner = name.rpartition(".")[0]
        inner = modules.get(owner)
        caller = inner if type(inner).__name__ in FAMILIES else modules.get(
            owner.rpartition(".")[0])
        if type(caller).__name__ not in FAMILIES:
            unknown.add(type(caller).__name__)
    if unknown:
        raise CannotDivide(f"how to divide {', '.join(sorted(unknown))} is not known")


def _shard(parameter: nn.Parameter, dim: int | None, degree: int) -> nn.Parameter:
    shape = list(parameter.shape)
    if dim is not None:
        shape[dim] = -(-shape[dim] // degree)
    data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(shape)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _distribute(module: nn.Module, places: Mapping[str, int | None], group: Emulation) -> None:
    """Make a module's parameters DTensors of the stand-in's mesh: as many as the shards would be.

    The executor's are, so that their gradients cost here what they cost there.
    """
    for name, parameter in module._parameters.items():
        if parameter is not None:
            dim = places.get(name)
            made = DTensor.from_local(parameter.detach(), group.mesh(parameter.device.type),
                                      [Replicate() if dim is None else Shard(dim)], run_check=False)
            module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)


def _change(module: nn.Module, split_of: Mapping[str, Parameter], group: Emulation, copies: int
            ) -> None:
    """Make a module's own code work on shards; the same cases as in the executor."""
    family = FAMILIES.get(type(module).__name__)
    if family is not None:
        for attribute in family.group_attributes:
            if hasattr(module, attribute):
                setattr(module, attribute, getattr(module, attribute) // copies)
        for attribute in family.divided_attributes:
            setattr(module, attribute, getattr(module, attribute) // group.degree)
        if family.gathers_input:
            _wrap(module, lambda forward, *a, **k: _gather_input(group, forward, *a, **k))
        if family.reduces_output:
            _wrap(module, lambda forward, *a, **k: group.scatter(forward(*a, **k)))
        return
    weight = split_of.get("weight")
    if weight is None:
        if isinstance(module, nn.Embedding):
            _wrap(module, lambda forward, ids: forward(
                ids.narrow(1, 0, group.seq_len // group.degree)))
    elif isinstance(module, nn.Embedding):
        _wrap(module, lambda forward, ids: _vocabulary_lookup(module, group, ids))
    elif weight.split == "row":
        _wrap(module, lambda forward, x: _row(module, group, x))
    else:
        if hasattr(module, "nf"):
            module.nf //= group.degree
        _wrap(module, lambda forward, x: forward(group.gather(x)))


def _wrap(module: nn.Module, around: Callable[..., Any]) -> None:
    forward = module.forward
    vars(module)["forward"] = lambda *args, **kwargs: around(forward, *args, **kwargs)


def _gather_input(group: Emulation, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if args:
        return forward(group.gather(args[0]), *args[1:], **kwargs)
    return forward(**{**kwargs, "hidden_states": group.gather(kwargs["hidden_states"])})


def _row(module: Any, group: Emulation, x: torch.Tensor) -> torch.Tensor:
    partial = F.linear(x, module.weight) if isinstance(module, nn.Linear) else x @ module.weight
    out = group.scatter(partial)
    return out if module.bias is None else out + module.bias


def _vocabulary_lookup(module: Any, group: Emulation, ids: torch.Tensor) -> torch.Tensor:
    table = module.weight
    mine = ids < table.shape[0]
    padding = module.padding_idx
    found = F.embedding(ids * mine, table, padding if padding is not None
                        and padding < table.shape[0] else None)
    return group.scatter(found * mine.unsqueeze(-1))


def local_arguments(args: Any, kwargs: Any, group: Emulation) -> tuple[Any, Any]:
    """Activations that enter a layer, each as this rank's shard of the sequence."""
    def local(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.requires_grad and value.dim() > 1
                and value.shape[1] == group.seq_len):
            return value
        shard = value.detach().narrow(1, 0, group.seq_len // group.degree).contiguous()
        return shard.requires_grad_()
    found: tuple[Any, Any] = pytree.tree_map(local, (args, kwargs))
    return found
