"""From an nn.Module to its LayerGraph, without allocating a weight.

The model runs forward and backward on fake tensors at a few micro-batches and sequence lengths
(see `trace_fit`), every operation is attributed to a layer (see `trace_partition` for what a
layer is), and layers whose costs are equal share a kind. Nothing that runs is left out:

    - Work outside every layer module (a residual sum, a loss, a position table, a mask) belongs to
      the layer called before it, or to the first layer. The loss thus belongs to the head.
    - A parameter outside every called layer module belongs to the first layer whose work reads it;
      its name there starts with "/" and is fully qualified.
    - A tensor that several layers save is listed once: by the first that has it as its input.
    - Tensors that depend on no parameter (rotary tables, masks, shifted labels) make no edge, since
      every stage can rebuild them from the sample. One that depends on no sample either
      is listed, if saved, by the layer that made it.

Sizes hold for sequences up to the model's sliding window, if it has one: within it, attention is
full.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph, ModelSource
from profiler.losses import Built, attached, taken_apart
from profiler.trace_build import build_graph
from profiler.trace_events import Run
from profiler.trace_fake import COMPUTE_DTYPE, fake_parameters
from profiler.trace_fit import Fit, image_points, token_points
from profiler.trace_partition import find_layers, signature
from profiler.trace_run import record

__all__ = ["InputMaker", "Sample", "as_arguments", "find_function", "input_maker", "trace",
           "trace_function", "trace_module"]

Sample = Literal["tokens", "images", "features"]
InputMaker = Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]
"""(micro-batch, sequence length) -> (args, kwargs) of the model's forward; called under fakes."""

USUAL_STEP = 64
"""Sequence lengths of the runs are 1, 2, 3 and 4 times this, where the model allows."""


def trace(model: nn.Module | Callable[[], Any], example_inputs: Any = None, *, name: str,
          sample: Sample | None = None, max_seq_len: int | None = None,
          source: ModelSource | None = None, loss: Any = None, targets: Any = None) -> LayerGraph:
    """Trace any module, or what a function returns: a module, example inputs, and the loss.

    example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments; only shapes
        and types matter. Dim 0 of each tensor is the batch; where `sample` is "tokens"
        (the default if the first tensor is 2-D and integer), dim 1 is the sequence wherever it has
        its length.
    max_seq_len: the longest sequence the model takes, where it is limited.
    loss, targets: as in `profiler.losses`; of a module that returns its loss, none.

    Raises:
        InvalidInput: no example inputs, a forward that fails or depends on data, a layer called
            twice, no parameters.
    """
    if not isinstance(model, nn.Module) and (loss is not None or targets is not None):
        raise InvalidInput(f"{name}: loss and targets are of a module alone: a function returns "
                           "them beside its module")
    built = (taken_apart((model, example_inputs, loss, targets), name)
             if isinstance(model, nn.Module) else _build(model, name))
    if example_inputs is None:
        example_inputs = built.inputs
    if example_inputs is None:
        raise InvalidInput(f"{name}: example inputs are needed: pass them, or return "
                           f"(module, example_inputs) from the function that builds the model")
    args, kwargs = as_arguments(example_inputs)
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if not tensors or tensors[0].dim() == 0:
        raise InvalidInput(f"{name}: example inputs need a tensor whose dim 0 is the batch")
    first = tensors[0]
    if sample is None:
        integer = not first.dtype.is_floating_point and first.dim() == 2
        sample = "tokens" if integer else "images" if first.dim() == 4 else "features"
    if sample == "tokens" and first.dim() < 2:
        raise InvalidInput(f"{name}: tokens need inputs of shape (batch, sequence, ...), got "
                           f"{tuple(first.shape)}")
    make = input_maker(args, kwargs, first, sample)
    with attached(replace(built, inputs=example_inputs)):
        return trace_module(built.module, make, name=name, sample=sample, max_seq_len=max_seq_len,
                            source=replace(source or ModelSource(), loss=built.loss_name))


def trace_function(path: str, *, name: str | None = None, sample: Sample | None = None,
                   max_seq_len: int | None = None) -> LayerGraph:
    """Trace the model that the function at "package.module:function" builds.

    The function takes no arguments and returns (module, example inputs), and where the module
    returns predictions and no loss, the loss (see `profiler.losses`).

    Raises:
        InvalidInput: it cannot be imported or called, or returns something else.
    """
    return trace(find_function(path), name=name or path, sample=sample, max_seq_len=max_seq_len,
                 source=ModelSource(python_function=path))


def find_function(path: str) -> Callable[..., Any]:
    """The function at "package.module:function", looked for in the current folder too.

    Raises:
        InvalidInput: it cannot be imported.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise InvalidInput(f"{path!r}: a function is named as package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command does not look there by itself
        sys.path.insert(0, here)
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"{path!r}: cannot be imported: {error}") from error
    if not callable(target) or isinstance(target, type):
        raise InvalidInput(f"{path!r}: is {type(target).__name__}, not a function")
    found: Callable[..., Any] = target
    return found


def trace_module(model: nn.Module, make_inputs: InputMaker, *, name: str, sample: Sample,
                 source: ModelSource, max_seq_len: int | None = None,
                 window: int | None = None, rows_multiple: int = 1) -> LayerGraph:
    """Trace a module whose inputs can be made at any size.

    window: no run is longer than this, though the model takes `max_seq_len`.
    rows_multiple: sequence lengths of the runs are multiples of this (experts in a mixture).
    """
    layers = find_layers(model)
    if not layers or next(model.parameters(), None) is None:
        raise InvalidInput(f"{name}: the model has no parameters, so there is nothing to plan")
    points = image_points()
    if sample == "tokens":
        points = token_points(_step(name, max_seq_len, window, rows_multiple))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    originals = dict(model.named_parameters(remove_duplicate=False))
    with warnings.catch_warnings(), mode, fake_parameters(model) as fakes:
        warnings.simplefilter("ignore")
        signatures = {path: signature(module) for path, module in layers.items()}
        runs = [record(model, layers, signatures, fakes, functools.partial(make_inputs, b, s))
                for b, s in points]
    _same_structure(runs)
    if source.loss is None and source.hugging_face_config is None:
        source = replace(source, loss="module" if runs[0].has_loss else "none")
    reference = (1, min(max_seq_len or 4096, 4096) if sample == "tokens" else 1)
    return build_graph(model, layers, originals, runs, Fit.over(points), name=name, sample=sample,
                       max_seq_len=max_seq_len, source=source, reference=reference)


def _step(name: str, max_seq_len: int | None, window: int | None, multiple: int) -> int:
    shorter = window - 1 if window else None  # as long as the window, masks are written out
    limit = min(length for length in (max_seq_len, shorter, 1 << 30) if length) // 4
    step = min(limit, max(USUAL_STEP, multiple))
    step -= step % (multiple if multiple > 1 else 2)
    if step < 2:
        raise InvalidInput(f"{name}: sequences of {4 * max(2, multiple)} tokens are needed to "
                           f"trace it, and it takes at most {limit * 4}")
    return step


def _same_structure(runs: Sequence[Run]) -> None:
    """Runs that differ in size only did the same work in the same order."""
    def structure(run: Run) -> list[Any]:
        return [(op.name, op.layer, op.inside, op.module, op.origin,
                 tuple(use.storage for use in op.reads), tuple(use.storage for use in op.writes))
                for op in run.ops]

    expected = structure(runs[0])
    for run in runs[1:]:
        found = structure(run)
        if found != expected:
            where = next((f"{a[0]} in {a[3] or 'the model'}" for a, b in
                          zip(expected, found, strict=False) if a != b), "its last operation")
            raise InvalidInput(f"the model does other work at another input size, from {where} on; "
                               f"loops over the sequence are not supported")


def _build(builder: Callable[[], Any], name: str) -> Built:
    """Call a builder on the meta device, or on fake tensors where that fails."""
    if not callable(builder):
        raise InvalidInput(f"a module or a function that builds one is needed, got "
                           f"{type(builder).__name__}")
    try:
        with torch.device("meta"):
            built = builder()
    except (RuntimeError, NotImplementedError):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                built = builder()
        except Exception as error:  # whatever a user's own function raises
            raise InvalidInput(f"the model cannot be built: {error}") from error
    except Exception as error:
        raise InvalidInput(f"the model cannot be built: {error}") from error
    return taken_apart(built, name)


def as_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, dict):
        return (), example
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def input_maker(args: Any, kwargs: Any, first: torch.Tensor, sample: Sample) -> InputMaker:
    batch, length = first.shape[0], first.shape[1] if first.dim() > 1 else -1

    def make(micro_batch: int, seq_len: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def resize(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape = list(leaf.shape)
            if shape and shape[0] == batch:
                shape[0] = micro_batch
                if sample == "tokens" and len(shape) > 1 and shape[1] == length:
                    shape[1] = seq_len
            dtype = COMPUTE_DTYPE if leaf.dtype.is_floating_point else leaf.dtype
            return torch.empty(shape, dtype=dtype)

        made_args, made_kwargs = pytree.tree_map(resize, (args, kwargs))
        return made_args, made_kwargs
    return make
