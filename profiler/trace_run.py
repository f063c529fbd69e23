"""One run of a model on fake tensors: forward and backward, written down operation by operation."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from profiler.errors import InvalidInput, MeshwrightError
from profiler.trace_events import Run
from profiler.trace_fake import accelerator_forms
from profiler.trace_recorder import Recorder, tensor_leaves

__all__ = ["record", "seeds_of"]


@contextmanager
def _watched(model: nn.Module, layers: dict[str, nn.Module],
             recorder: Recorder) -> Iterator[None]:
    """Put the recorder around the forward of every module of the model."""
    changed: list[tuple[nn.Module, Any]] = []
    prefixes = {id(module): path for path, module in layers.items()}
    done: set[int] = set()
    try:
        def visit(module: nn.Module, path: str) -> None:
            if id(module) in done:
                return
            done.add(id(module))
            changed.append((module, vars(module).get("forward")))
            if id(module) in prefixes:
                wrapped = recorder.layer(prefixes[id(module)], module.forward)
                path = ""
            else:
                wrapped = recorder.submodule(module, path, module.forward)
            module.forward = wrapped
            for name, child in module.named_children():
                visit(child, f"{path}.{name}" if path else name)

        visit(model, "")
        yield
    finally:
        for module, before in changed:
            if before is None:
                vars(module).pop("forward", None)
            else:
                module.forward = before


def seeds_of(out: Any) -> list[torch.Tensor]:
    """The results that backward starts from: the loss if there is one, else all."""
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return [loss] if loss.requires_grad else []
    return [tensor for tensor in tensor_leaves(out) if tensor.requires_grad]


def record(model: nn.Module, layers: dict[str, nn.Module], signatures: dict[str, Any],
           fakes: dict[int, torch.Tensor], inputs: Callable[[], tuple[Any, Any]]) -> Run:
    """Run forward and backward once and return what was seen.

    Must be called under a FakeTensorMode, with the model's parameters fake. `inputs()` makes the
    arguments.

    Raises:
        InvalidInput: the model's control flow depends on data, or its forward fails.
    """
    recorder = Recorder(signatures)
    args, kwargs = inputs()
    _register(recorder, fakes, (args, kwargs))
    with ExitStack() as stack:
        # Lifetimes are those of reference counts; a collection in the middle would shorten some.
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        stack.enter_context(_watched(model, layers, recorder))
        stack.enter_context(recorder)
        stack.enter_context(accelerator_forms(recorder))
        try:
            _run(model, args, kwargs, recorder)
        except MeshwrightError:
            raise
        except Exception as error:  # whatever a user's own forward raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise InvalidInput(f"the model cannot be run on fake tensors (in {recorder.where()}; "
                               f"its control flow must not depend on data): {reason}") from error
    for fake in fakes.values():
        fake.grad = None
    return recorder.run


def _register(recorder: Recorder, fakes: dict[int, torch.Tensor], inputs: Any) -> None:
    for real, fake in fakes.items():
        is_parameter = isinstance(fake, nn.Parameter)
        index = recorder.storage_of(fake, external=True, derived=is_parameter,
                                    learned=is_parameter)
        if is_parameter:
            recorder.run.parameters.setdefault(index, real)
        else:
            recorder.run.buffers.add(index)
    for tensor in tensor_leaves(inputs):
        recorder.storage_of(tensor, external=True, derived=True)


def _run(model: nn.Module, args: Any, kwargs: Any, recorder: Recorder) -> None:
    with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
        out = model(*args, **kwargs)
    seeds = seeds_of(out)
    del out
    if not seeds:
        return
    recorder.start_backward()
    recorder.run.has_loss = len(seeds) == 1 and seeds[0].dim() == 0
    if recorder.run.has_loss:
        seeds[0].backward()
        return
    with recorder.muted():
        grads = [torch.empty_like(t) for t in seeds]
    torch.autograd.backward(seeds, grads)
