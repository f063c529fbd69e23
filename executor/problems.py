"""The batches and losses that `verify` compares a model on."""

from __future__ import annotations

from typing import Any

import torch

from executor.compare import Problem
from executor.data import make_source
from executor.losses import Loss, cross_entropy, mean_squared_error, prediction_of
from executor.models import build_module
from planner.layout import Layout
from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph
from profiler.losses import taken_apart
from profiler.trace import find_function

__all__ = ["problem_of"]

SEED = 0


def problem_of(graph: LayerGraph, layout: Layout) -> Problem:
    """One global batch for a model, built anew from what its graph says it came from.

    Raises:
        InvalidInput: the graph does not say, or the model takes nothing that can be made up.
    """
    if graph.source.hugging_face_config is not None:
        return _hugging_face(graph, layout)
    if graph.source.python_function is not None:
        return _function(graph, layout)
    raise InvalidInput(f"the LayerGraph of {graph.name!r} does not say what it was traced from")


def _hugging_face(graph: LayerGraph, layout: Layout) -> Problem:
    """Micro-batches hold unequal numbers of targets."""
    batch = layout.request.global_batch

    def model(dtype: torch.dtype) -> Any:
        made = build_module(graph, seed=SEED).to(dtype)
        if hasattr(made.config, "_experts_implementation"):
            made.config._experts_implementation = "eager"  # the fused one knows no float64
        return made

    source = make_source(graph, layout.request.seq_len, None, None, model(torch.float32).config)
    inputs, targets = source.batch(0, batch)
    if targets.dim() > 1:
        hidden = torch.arange(targets.shape[1])[None] < torch.arange(batch)[:, None]
        targets = targets.masked_fill(hidden, -100)
    return Problem(model=model, inputs=lambda dtype: _cast(inputs, dtype),
                   targets=lambda dtype: targets, loss=cross_entropy(), max_norm=1.0)


def _function(graph: LayerGraph, layout: Layout) -> Problem:
    """Random inputs of the example's kind; the result is drawn towards random values."""
    batch = layout.request.global_batch
    name = str(graph.source.python_function)
    example_inputs = taken_apart(find_function(name)(), name).inputs
    if example_inputs is None:
        raise InvalidInput(f"{name}: must return (module, example_inputs) to be verified")
    generator = torch.Generator().manual_seed(SEED)

    def drawn(example: Any) -> Any:
        if isinstance(example, dict):
            return {key: drawn(value) for key, value in example.items()}
        if isinstance(example, (tuple, list)):
            return tuple(drawn(value) for value in example)
        if not isinstance(example, torch.Tensor) or example.dim() == 0:
            raise InvalidInput(f"{name}: example inputs must be tensors with the batch as dim 0, "
                               f"there is {type(example).__name__}")
        shape = (batch, *example.shape[1:])
        if example.is_floating_point():
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        values = example.flatten()
        return values[torch.randint(len(values), shape, generator=generator)]

    inputs = drawn(example_inputs)
    module = build_module(graph, seed=SEED)
    with torch.no_grad():
        args, kwargs = _arguments(_cast(inputs, torch.float32))
        result = prediction_of(module(*args, **kwargs))
    targets = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    loss: Loss = mean_squared_error()
    return Problem(model=lambda dtype: build_module(graph, seed=SEED).to(dtype),
                   inputs=lambda dtype: _cast(inputs, dtype),
                   targets=lambda dtype: targets.to(dtype), loss=loss, max_norm=1.0)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    """Floating inputs in another dtype."""
    if isinstance(inputs, dict):
        return {key: _cast(value, dtype) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_cast(value, dtype) for value in inputs)
    return inputs.to(dtype) if inputs.is_floating_point() else inputs
