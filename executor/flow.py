"""Which layer reads which outputs of which layers: what each pipeline cut must carry.

Learnt from one run of the model's own forward in which no layer computes: each returns placeholders
of the shapes that it would return, and notes the placeholders that reach it. Glue between layers
runs as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from profiler.errors import InvalidInput
from profiler.layer_calls import LayerCalls
from profiler.placeholder import Placeholder, Source, placeholders_in
from profiler.trace_fake import is_experts

__all__ = ["Flow", "Output", "TensorSpec", "find_flow"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (of the whole tensor), dtype, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True, slots=True)
class Output:
    """What a layer returns: `leaves` holds a TensorSpec for a tensor, any other value as it is."""

    leaves: tuple[Any, ...]
    spec: Any

    def tensors(self) -> list[TensorSpec]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    def build(self, tensors: Sequence[Any]) -> Any:
        """The layer's result with these tensors in the places of the TensorSpecs."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True)
class Flow:
    """outputs: by layer. reads: the sources each layer reads. result: those the result needs."""

    outputs: dict[int, Output]
    reads: dict[int, frozenset[Source]]
    result: frozenset[Source]

    def spec(self, source: Source) -> TensorSpec:
        return self.outputs[source[0]].tensors()[source[1]]

    def carried(self, stage_of: dict[int, int], num_stages: int) -> list[tuple[Source, ...]]:
        """For each cut after stage k < num_stages - 1: the tensors alive across it, in order."""
        last_reader: dict[Source, int] = dict.fromkeys(self.result, num_stages - 1)
        for layer, sources in self.reads.items():
            for source in sources:
                last_reader[source] = max(last_reader.get(source, 0), stage_of[layer])
        return [tuple(sorted(source for source, last in last_reader.items()
                             if stage_of[source[0]] <= cut < last))
                for cut in range(num_stages - 1)]


def find_flow(model: nn.Module, names: Sequence[str], args: tuple[Any, ...],
              kwargs: dict[str, Any], compute_dtype: torch.dtype | None) -> Flow:
    """Run `model` once with every layer replaced by its shapes.

    names: layer modules in the order of their calls. compute_dtype: what floating parameters and
        inputs are cast to before they are computed with; None where they are not.

    Raises:
        InvalidInput: the layers are not called once each in that order.
        UnsupportedLayout: glue code between layers depends on the values of an activation.
    """
    outputs: dict[int, Output] = {}
    reads: dict[int, frozenset[Source]] = {}
    devices = [p.device for p in model.parameters()]
    device = devices[0] if devices and devices[0].type != "meta" else torch.device("cpu")

    def handle(index: int, module: nn.Module, forward: Any, a: Any, k: Any) -> Any:
        if index in outputs:
            raise InvalidInput(f"layer {index} ({names[index]}) is called more than once")
        found = placeholders_in((a, k))
        reads[index] = frozenset[Source]().union(*(p.sources for p in found))
        differentiable = any(p.differentiable for p in found) or any(
            p.requires_grad for p in module.parameters())
        outputs[index] = _shapes(module, forward, a, k, compute_dtype, differentiable)
        return outputs[index].build([
            Placeholder(torch.empty(t.shape, dtype=t.dtype, device="meta"), device,
                        frozenset({(index, j)}), t.differentiable)
            for j, t in enumerate(outputs[index].tensors())])

    with LayerCalls.intercept(model, names, handle), torch.no_grad():
        result = model(*args, **kwargs)
    if list(outputs) != list(range(len(names))):
        raise InvalidInput(f"the model calls its layers in the order {list(outputs)[:12]}..., the "
                           f"layout "
                           f"counts on 0..{len(names) - 1}: trace it again")
    needed = frozenset[Source]().union(*(p.sources for p in placeholders_in(_tensors(result))))
    return Flow(outputs, reads, needed)


def _tensors(result: Any) -> list[Any]:
    """Every tensor of a result, Hugging Face outputs included."""
    values = list(result.values()) if isinstance(result, dict) else result
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _shapes(module: nn.Module, forward: Any, args: Any, kwargs: Any,
            compute_dtype: torch.dtype | None, differentiable: bool) -> Output:
    """Run one layer on fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dtype = leaf.dtype
        if compute_dtype is not None and dtype.is_floating_point:
            dtype = compute_dtype
        return torch.empty(leaf.shape, dtype=dtype, device="cpu")

    # routing looks at values; whatever it finds, experts return a tensor like their input
    experts = [(inner, vars(inner).get("forward")) for inner in module.modules()
               if is_experts(inner)]
    stores = [(inner._parameters, dict(inner._parameters)) for inner in module.modules()]
    buffers = [(inner._buffers, dict(inner._buffers)) for inner in module.modules()]
    with mode, torch.no_grad():
        try:
            for inner, _ in experts:
                vars(inner)["forward"] = lambda hidden, *_: torch.empty_like(hidden)
            for store, values in stores:
                for key, value in values.items():
                    if value is not None:
                        store[key] = nn.Parameter(fake(value), requires_grad=False)
            for store, values in buffers:
                for key, value in values.items():
                    if value is not None:
                        store[key] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            out = forward(*pytree.tree_map(fake, args), **pytree.tree_map(fake, kwargs))
        finally:
            for store, values in (*stores, *buffers):
                store.update(values)
            for inner, before in experts:
                if before is None:
                    del vars(inner)["forward"]
                else:
                    vars(inner)["forward"] = before
    leaves, spec = pytree.tree_flatten(out)
    made = tuple(TensorSpec(tuple(leaf.shape), leaf.dtype,
                            differentiable and leaf.dtype.is_floating_point)
                 if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Output(made, spec)
