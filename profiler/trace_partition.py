"""Which modules of a model are its layers, and when two of them are alike.

The layers are found from the module tree alone:

    1. The root is opened: its children are candidates.
    2. A Sequential, ModuleList or ModuleDict directly below an opened module is opened.
    3. A module that holds a *block list* is opened. A block list is one of those containers whose
       composite children (those with parameters and children of their own) share one class: the
       transformer blocks of every Hugging Face model, the stages of a ResNet.
    4. A module inside a block list stays whole, unless all it holds is one more block list
       (a ResNet stage: its bottleneck blocks are the layers).
    5. Every other module stays whole. One without parameters is no layer: its work belongs to
       the layer called before it.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

__all__ = ["caller_class", "find_layers", "has_batch_statistics", "signature"]

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

_POSITION_NAMES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})
"""Attributes that say where a layer stands and nothing about what it costs."""


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if _has_parameters(child)]


def _is_block_list(module: nn.Module) -> bool:
    if not isinstance(module, _LISTS):
        return False
    composite = {type(child) for _, child in _parts(module) if _parts(child)}
    return len(composite) == 1


def _holds_block_list(module: nn.Module) -> bool:
    return any(_is_block_list(inner) for inner in module.modules())


def find_layers(root: nn.Module) -> dict[str, nn.Module]:
    """The modules that are layers, by fully qualified name, in the order of the module tree."""
    layers: dict[str, nn.Module] = {}

    def visit(path: str, module: nn.Module, in_block_list: bool) -> None:
        parts = _parts(module)
        if in_block_list:
            opened = len(list(module.children())) == 1 and _is_block_list(parts[0][1])
        else:
            opened = bool(parts) and (isinstance(module, _LISTS) or _holds_block_list(module))
        if opened or (not path and parts):
            inside = _is_block_list(module)
            for name, child in parts:
                visit(f"{path}.{name}" if path else name, child, inside)
        elif module not in layers.values():
            layers[path] = module

    visit("", root, False)
    return layers


def caller_class(layer: nn.Module, parameter: str) -> str:
    """The class whose code calls the matmul by a parameter, which is not that of a bare matmul."""
    modules = dict(layer.named_modules())
    if parameter.startswith("/"):  # outside every layer
        return type(layer).__name__
    path = parameter.rpartition(".")[0]
    if path and (isinstance(modules[path], nn.Linear) or type(modules[path]).__name__ == "Conv1D"):
        path = path.rpartition(".")[0]
    return type(modules[path]).__name__


def has_batch_statistics(layer: nn.Module) -> bool:
    """Whether a module normalizes by statistics of the batch that it is given."""
    return any(isinstance(inner, nn.modules.batchnorm._BatchNorm) and inner.training
               for inner in layer.modules())


def _plain(value: Any, depth: int = 0) -> Any:
    """A hashable stand-in for an attribute: its value if plain data, else its identity."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, type)):
        return value
    if isinstance(value, torch.Tensor):
        return tensor_signature(value)
    if depth < 6 and isinstance(value, (list, tuple, set, frozenset)):
        return (type(value).__name__, *(_plain(item, depth + 1) for item in value))
    if depth < 6 and isinstance(value, dict):
        return tuple((str(key), _plain(item, depth + 1)) for key, item in value.items())
    if isinstance(value, functools.partial):
        return (_plain(value.func), _plain(value.args), _plain(value.keywords))
    if isinstance(value, types.MethodType):
        return (type(value.__self__), id(value.__func__))
    return id(value)


def tensor_signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All of a tensor that can change what a layer costs."""
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


def signature(module: nn.Module) -> tuple[Any, ...]:
    """What decides the cost of calling `module`, its arguments apart.

    Class, parameter and buffer shapes, what is frozen, and every attribute of every submodule;
    an attribute that is no plain data counts by identity, so that in doubt two layers differ.
    """
    items: list[Any] = []
    for name, inner in module.named_modules():
        items.append((name, type(inner), inner.training))
        for key, tensor in (*inner._parameters.items(), *inner._buffers.items()):
            items.append((key, None if tensor is None else tensor_signature(tensor)))
        items.extend((key, _plain(value)) for key, value in vars(inner).items()
                     if not key.startswith("_") and key not in _POSITION_NAMES
                     and key not in {"training", "forward"})
    return tuple(items)
