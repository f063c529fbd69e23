"""Tensors that are not there: what stands in a stage for values that other stages compute.

A `Placeholder` has shape, dtype and device, and no values. An operation with one among its operands
is not
computed: its result is a Placeholder again, which remembers the layer outputs that it was made of.
A model's own forward can so be run on every stage, glue code and all, at the cost of the stage's
own layers; and one run with placeholders for every layer shows which layer reads what.

An operation's shapes are remembered: torch takes up to a millisecond to work them out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from profiler.errors import UnsupportedLayout

__all__ = ["Placeholder", "Source", "placeholders_in"]

Source = tuple[int, int]
"""(layer index, position among the tensors that the layer returns)."""

_SHAPE_ONLY = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
                         "randn_like", "new_empty", "new_zeros", "new_ones", "new_full"})
"""Operations whose result depends on the operand's shape alone: it can be computed for real."""


class Placeholder(torch.Tensor):  # type: ignore[misc]
    """Stands for a tensor that depends on the layer outputs `sources`."""

    meta: torch.Tensor
    sources: frozenset[Source]
    differentiable: bool

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device, sources: frozenset[Source],
                differentiable: bool) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(),
            dtype=meta.dtype, device=device, requires_grad=False)
        made.meta, made.sources = meta, sources
        made.differentiable = differentiable and meta.dtype.is_floating_point
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **_: Any) -> str:  # torch's own would ask for the values
        return f"Placeholder({tuple(self.shape)}, {self.dtype}, of {sorted(self.sources)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = placeholders_in((args, kwargs))
        device = found[0].device
        name = func._schema.name.split("::")[-1]
        if name in _SHAPE_ONLY:
            kwargs = {"device": device, **kwargs} if "_like" in name else kwargs
            args = pytree.tree_map_only(
                Placeholder, lambda p: torch.empty_strided(p.shape, p.stride(), dtype=p.dtype,
                                                           device=p.device), args)
            return func(*args, **kwargs)
        if name in {"_local_scalar_dense", "equal", "is_nonzero"}:
            raise UnsupportedLayout(
                "the model's forward looks at the values of an activation between its layers "
                f"({name}), which only one stage has: it cannot be cut into pipeline stages")
        sources = frozenset[Source]().union(*(p.sources for p in found))
        differentiable = any(p.differentiable for p in found)
        return _on_meta(func, args, kwargs, found, device, sources, differentiable)


def _on_meta(func: Any, args: Any, kwargs: Any, found: list[Placeholder], device: torch.device,
             sources: frozenset[Source], differentiable: bool) -> Any:
    """Shapes only: the operation on meta tensors, its results wrapped again."""
    originals: dict[int, Placeholder] = {}

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, Placeholder):
            originals[id(leaf.meta)] = leaf
            return leaf.meta
        if isinstance(leaf, torch.Tensor):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        return leaf

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in originals:  # written in place: the same placeholder, of more sources
            same = originals[id(leaf)]
            same.sources, same.differentiable = sources, differentiable
            return same
        return Placeholder(leaf, device, sources, differentiable)

    if func._schema.is_mutable and not isinstance(args[0], Placeholder):
        raise UnsupportedLayout(
            f"the model's forward writes an activation into another tensor between its layers "
            f"({func}): it cannot be cut into pipeline stages")
    key = _key(func, args, kwargs)
    if key is None:
        out = func(*pytree.tree_map(to_meta, args), **pytree.tree_map(to_meta, kwargs))
        return pytree.tree_map(wrap, out)
    if key not in _KNOWN:
        made, spec = pytree.tree_flatten(
            func(*pytree.tree_map(to_meta, args), **pytree.tree_map(to_meta, kwargs)))
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = [(tuple(leaf.shape), leaf.stride(), leaf.dtype)
                       if isinstance(leaf, torch.Tensor) else leaf for leaf in made], spec
    leaves, spec = _KNOWN[key]
    return pytree.tree_unflatten([
        wrap(torch.empty_strided(leaf[0], leaf[1], dtype=leaf[2], device="meta"))
        if isinstance(leaf, tuple) else leaf for leaf in leaves], spec)


_KNOWN: dict[Any, tuple[list[Any], Any]] = {}
MOST_KNOWN = 10_000


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """All that the results of an operation depend on, if it makes new tensors of known shapes."""
    schema = func._schema
    if schema.is_mutable or any(result.alias_info is not None for result in schema.returns):
        return None
    leaves, spec = pytree.tree_flatten((args, kwargs))
    key = (func, spec, torch.get_default_dtype(), *(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor)
        else (type(leaf), leaf) for leaf in leaves))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def placeholders_in(tree: Any) -> list[Placeholder]:
    """Every placeholder in nested arguments or results."""
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, Placeholder)]


def _leaves(tree: Any) -> list[Any]:
    return list(pytree.tree_leaves(tree))
