"""The layers of a model as its forward calls them.

`LayerCalls` puts one handler around the forward of every layer module. The handler is told which
layer (by its place in the LayerGraph) is called, so a module that is registered under two names and
called twice is two layers. Everything else of the model's forward stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from profiler.errors import InternalError, InvalidInput

__all__ = ["Handler", "LayerCalls", "layer_modules", "leaf_modules_with_parameters"]

Handler = Callable[[int, nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(layer index, module, its own forward, args, kwargs) -> the layer's result."""


def layer_modules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The module of every layer.

    Raises:
        InvalidInput: the model lacks some of them.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in names if name not in known]
    if missing:
        raise InvalidInput(f"the model has no module {', '.join(map(repr, missing[:5]))}"
                           f"{' ...' if len(missing) > 5 else ''}: it is not the one that was "
                           f"traced")
    return [known[name] for name in names]


def leaf_modules_with_parameters(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every submodule that holds parameters of its own."""
    return [(name, inner) for name, inner in module.named_modules()
            if any(p is not None for p in inner._parameters.values())]


class LayerCalls:
    """Handlers around the layers of one model."""

    def __init__(self, model: nn.Module, names: Sequence[str], handler: Handler) -> None:
        self._places: dict[int, list[int]] = {}
        self._next: dict[int, int] = {}
        self._handler = handler
        self._changed: list[tuple[nn.Module, Any]] = []
        modules = layer_modules(model, names)
        for index, module in enumerate(modules):
            self._places.setdefault(id(module), []).append(index)
        for module in {id(m): m for m in modules}.values():
            self._changed.append((module, vars(module).get("forward")))
            vars(module)["forward"] = self._wrapped(module, module.forward)

    def _wrapped(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        places = self._places[id(module)]

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            number = self._next.get(id(module), 0)
            if number >= len(places):
                raise InternalError(f"layer {places[0]} is called more often than when traced")
            self._next[id(module)] = number + 1
            return self._handler(places[number], module, forward, args, kwargs)
        return call

    def begin(self) -> None:
        """A new forward of the whole model starts."""
        self._next.clear()

    def remove(self) -> None:
        """Give the modules their own forwards back."""
        for module, before in self._changed:
            if before is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = before

    @classmethod
    @contextmanager
    def intercept(cls, model: nn.Module, names: Sequence[str], handler: Handler) -> Iterator[None]:
        """For one forward of the model."""
        with cls(model, names, handler).kept():
            yield

    @contextmanager
    def kept(self) -> Iterator[LayerCalls]:
        """For the length of a block, with `begin` before each forward but the first."""
        try:
            yield self
        finally:
            self.remove()
