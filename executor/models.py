"""The model of a layout and its loss, built anew from what its LayerGraph says it came from."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from executor.deferred import Deferred
from executor.legality import check_model
from executor.losses import LOSSES, Loss
from planner.layout import Layout
from planner.models import resolve
from profiler.errors import InvalidInput, UnknownName
from profiler.layer_graph import LayerGraph
from profiler.losses import OWN, named_loss, taken_apart
from profiler.trace import find_function

__all__ = ["build_deferred", "build_module", "graph_of", "make_loss"]


def graph_of(layout: Layout, model: str | None = None) -> LayerGraph:
    """The LayerGraph that a layout was made for.

    model: where to find it, if not under the name in the layout (see `planner.models.resolve`).

    Raises:
        InvalidInput: it cannot be found, or is another than the layout's.
    """
    try:
        graph = resolve(model or layout.model.name, name=layout.model.name if model else None)
    except UnknownName as error:
        raise InvalidInput(f"the layout's model {layout.model.name!r} is not in the catalogue: "
                           f"name "
                           f"its config or function with --model ({error})") from None
    check_model(layout, graph)
    return graph


def build_module(graph: LayerGraph, seed: int) -> nn.Module:
    """The module with freshly drawn weights, the same for every process of one seed.

    Raises:
        InvalidInput: the graph does not say what it came from, or it cannot be built.
    """
    torch.manual_seed(seed)
    source = graph.source
    if source.hugging_face_config is not None and source.hugging_face_class is not None:
        return _hugging_face(source.hugging_face_class, source.hugging_face_config)
    if source.python_function is not None:
        return _function(source.python_function)
    raise InvalidInput(f"the LayerGraph of {graph.name!r} does not say what it was traced from: "
                       f"pass the "
                       f"module to executor.parallelize from Python")


def build_deferred(graph: LayerGraph, seed: int) -> nn.Module | Deferred:
    """The same without memory for its weights, where its code can be run so."""
    try:
        return Deferred.build(lambda: build_module(graph, seed), seed)
    except InvalidInput:
        return build_module(graph, seed)


def _hugging_face(class_name: str, config: dict[str, Any]) -> nn.Module:
    import transformers

    maker: Any = getattr(transformers, class_name, None)
    if not (inspect.isclass(maker) and issubclass(maker, transformers.PreTrainedModel)):
        raise InvalidInput(f"transformers has no model class {class_name!r}")
    values = {k: v for k, v in config.items() if k not in {"model_type", "architectures"}}
    make: Any = maker
    try:
        built = transformers.AutoConfig.for_model(config["model_type"], **values)
        model: nn.Module = make(built)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{class_name} cannot be built of its config: "
                           f"{' '.join(str(error).split())[:200]}") from error
    return model.train()


def _function(path: str) -> nn.Module:
    return taken_apart(find_function(path)(), path).module.train()


def make_loss(graph: LayerGraph, name: str | None) -> Loss:
    """The loss by its name; without one, that which the model was traced with.

    Raises:
        InvalidInput: another was traced: what it holds and takes is not what was planned.
    """
    traced = named_loss(graph)
    if None not in (name, traced) and traced != name:
        raise InvalidInput(f"--loss {name}: {graph.name!r} was planned with the loss of its "
                           f"function ({traced}); change it there and plan again")
    if traced != OWN:
        return LOSSES[name or traced or "cross-entropy"]()
    path = str(graph.source.python_function)
    loss = taken_apart(find_function(path)(), path).loss
    if not isinstance(loss, Loss):
        raise InvalidInput(f"{path}: its loss, a {type(loss).__name__}, is no "
                           "executor.losses.Loss")
    return loss
