"""A model to measure: its code and buffers are real, its weights take no memory until they run.

Every parameter of the frame is one element, expanded to its shape: the model's own code may ask for
dtype, device and shape. `materialise` makes a real copy of one layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from profiler.errors import InvalidInput
from profiler.layer_calls import layer_modules
from profiler.layer_graph import LayerGraph
from profiler.losses import attach, named_loss, taken_apart
from profiler.trace import as_arguments, find_function, input_maker

__all__ = ["DTYPES", "Subject", "build_subject", "materialise", "random_arguments"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STANDARD_DEVIATION = 0.02

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Subject:
    """A LayerGraph with the module and inputs that it was traced from.

    model: only parameters outside of its layers are real. make_inputs: (micro-batch, sequence
        length) -> the arguments of its forward, on the device.
    """

    graph: LayerGraph
    model: nn.Module
    make_inputs: Callable[[int, int], Arguments]
    device: torch.device
    dtype: torch.dtype

    @property
    def names(self) -> list[str]:
        """The layers' names, in the order of the graph."""
        return [layer.name for layer in self.graph.layers]


@contextmanager
def _without_weights(dtype: torch.dtype) -> Iterator[None]:
    """Parameters become meta tensors as modules register them; buffers stay real.

    One that is registered again (a tie) is recognised by being on the meta device already.
    """
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            floating = param.dtype.is_floating_point
            empty = torch.empty(param.shape, dtype=dtype if floating else param.dtype,
                                device="meta")
            param = nn.Parameter(empty, requires_grad=param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def build_subject(graph: LayerGraph, device: torch.device, dtype: torch.dtype) -> Subject:
    """Build the module of a graph, ready to be measured.

    Raises:
        InvalidInput: the graph does not say what it was traced from, or that cannot be built.
    """
    source = graph.source
    bounds: Any
    if source.hugging_face_config is not None:
        from profiler.hugging_face import build_model, quiet
        from profiler.hugging_face import input_maker as hugging_face_inputs

        with quiet():
            model, task, config = build_model(source.hugging_face_config,
                                              lambda: _without_weights(dtype))
        maker = hugging_face_inputs(task, config)
        bounds = {"labels": config.num_labels if task == "images" else config.vocab_size,
                  "input_ids": getattr(config, "vocab_size", 2)}
    elif source.python_function is not None:
        model, maker, bounds = _from_function(source.python_function, graph, dtype)
    else:
        raise InvalidInput(f"the LayerGraph of {graph.name!r} does not say what it was traced "
                           "from, so that there is nothing to run and measure")
    model.train()
    _make_frame(model, [layer.name for layer in graph.layers], device)

    def make_inputs(micro_batch: int, seq_len: int) -> Arguments:
        return random_arguments(maker(micro_batch, seq_len), bounds, device, dtype)

    return Subject(graph=graph, model=model, make_inputs=make_inputs, device=device, dtype=dtype)


def _from_function(path: str, graph: LayerGraph, dtype: torch.dtype) -> tuple[nn.Module, Any, Any]:
    with _without_weights(dtype):
        try:
            made = find_function(path)()
        except Exception as error:  # whatever a user's own function raises
            raise InvalidInput(f"{path}: the model cannot be built: {error}") from error
    built = taken_apart(made, path)
    if built.inputs is None:
        raise InvalidInput(f"{path}: must return (module, example_inputs) to be measured")
    if built.loss_name != named_loss(graph):
        raise InvalidInput(f"{path}: its loss is {built.loss_name or 'none'}, and the LayerGraph "
                           f"was traced with {graph.source.loss or 'none'}: trace it again")
    attach(built)
    args, kwargs = as_arguments(built.inputs)
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return built.module, input_maker(args, kwargs, tensors[0], graph.sample), (args, kwargs)


def random_arguments(made: Arguments, bounds: Any, device: torch.device, dtype: torch.dtype
                     ) -> Arguments:
    """Random values: integers below a bound by name, or in the range of the examples."""
    def fill(empty: torch.Tensor, low: int, high: int) -> torch.Tensor:
        if empty.dtype.is_floating_point:
            return torch.randn(empty.shape, dtype=dtype, device=device)
        return torch.randint(low, high, empty.shape, dtype=empty.dtype, device=device)

    args, kwargs = made
    if isinstance(bounds, dict):
        return args, {key: fill(value, 0, bounds.get(key, 2)) for key, value in kwargs.items()}

    def like(leaf: Any, example: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if example.dtype.is_floating_point or example.dtype == torch.bool:
            return fill(leaf, 0, 2)
        return fill(leaf, int(example.min()), int(example.max()) + 1)
    filled: Arguments = pytree.tree_map(like, (args, kwargs), bounds)
    return filled


def _make_frame(model: nn.Module, names: Sequence[str], device: torch.device) -> None:
    """Expanded single elements in place of the layers' parameters, real ones outside of layers."""
    held = {id(p) for module in layer_modules(model, names) for p in module.parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                data = (torch.zeros((), dtype=parameter.dtype, device=device).expand(
                    parameter.shape) if id(parameter) in held
                    else _initial(name, parameter, device))
                made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _initial(name: str, parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values that keep activations in the usual range: denormal numbers would slow a CPU."""
    data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    if not data.dtype.is_floating_point:
        return data.zero_()
    if data.dim() > 1:
        return data.normal_(0.0, STANDARD_DEVIATION)
    return data.fill_(0.0 if name.endswith("bias") else 1.0)


def materialise(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a layer of the frame with real parameters."""
    names = {id(p): name for inner in module.modules() for name, p in inner._parameters.items()
             if p is not None}
    memo: dict[int, Any] = {
        id(p): nn.Parameter(_initial(names[id(p)], p, device), requires_grad=p.requires_grad)
        for p in module.parameters()}
    made: nn.Module = copy.deepcopy(module, memo)
    for inner in made.modules():
        vars(inner).pop("forward", None)  # a handler around the frame's own
    return made
