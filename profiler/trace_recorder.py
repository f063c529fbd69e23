"""The recorder: a dispatch mode that writes down operations and skips layers it has seen.

A layer that equals an earlier one (same signature, same arguments) is not run again: it returns
tensors like the earlier one's, so that a model of 126 layers costs what its distinct layers cost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from profiler.trace_events import Call, RawOp, Run, Storage, Use
from profiler.trace_fake import COMPUTE_DTYPE, balanced_experts, is_experts
from profiler.trace_partition import tensor_signature

__all__ = ["Recorder", "tensor_leaves"]

GATHERS = frozenset({"embedding", "index_select", "gather", "index"})
"""Operations that read of their source no more than they write."""

_NO_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
                        "lift_fresh", "_local_scalar_dense"})


def _is_transposed(tensor: torch.Tensor) -> bool:
    return bool(tensor.dim() >= 2 and tensor.stride(-1) != 1 and tensor.stride(-2) == 1)


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _Shortcut(torch.autograd.Function):  # type: ignore[misc]
    """The results of a layer known from an equal one, tied to its inputs for backward."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, likes: Sequence[torch.Tensor],
                *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        recorder.skip_node()
        ctx.recorder = recorder
        ctx.inputs = [(tuple(t.shape), t.stride(), t.dtype) for t in inputs]
        ctx.set_materialize_grads(False)
        outs = tuple(torch.empty_strided(like[0], like[1], dtype=like[2]) for like in likes)
        ctx.mark_non_differentiable(*(out for out, like in zip(outs, likes, strict=True)
                                      if not like[3]))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        with ctx.recorder.muted():
            made = [torch.empty_strided(*t[:2], dtype=t[2]) if need else None for t, need in
                    zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True)]
        for grad in made:
            if grad is not None:
                ctx.recorder.storage_of(grad)
        return (None, None, *made)


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Writes down every operation that reaches the dispatcher, with the layer it belongs to."""

    def __init__(self, signatures: dict[str, Any]) -> None:
        super().__init__()
        self.run = Run()
        self._signatures = signatures
        self._known: dict[Any, tuple[int, Any]] = {}
        self._ids: dict[int, int] = {}
        self._node_ops: dict[int, int | None] = {}
        self._muted = 0
        self._layer, self._inside = -1, False
        self._modules: list[tuple[str, bool]] = []
        self._backward = False
        self._last_origin: int | None = None
        self._grouped_from: int | None = None
        self._time = 0

    # ---- storages ----

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Within it, operations are not written down."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    def storage_of(self, tensor: torch.Tensor, creator: int | None = None,
                   *, external: bool = False, derived: bool = False,
                   learned: bool = False) -> int:
        """The index of a tensor's storage, registered when first seen."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._ids:
            index = len(self.run.storages)
            self._ids[key] = index
            self.run.storages.append(Storage(
                num_bytes=storage.nbytes(), itemsize=tensor.element_size(),
                fixed_dtype=tensor.dtype != COMPUTE_DTYPE, made_at=self._time, creator=creator,
                layer=-1 if external else max(self._layer, 0), external=external,
                derived=derived, learned=learned, writer=-1 if external else max(self._layer, 0)))
            weakref.finalize(storage, self._freed, key, index).atexit = False
        return self._ids[key]

    def _freed(self, key: int, index: int) -> None:
        if self._ids.get(key) == index:
            del self._ids[key]
            self.run.storages[index].freed = self._time

    def _use(self, tensor: torch.Tensor, storage: int) -> Use:
        stored = self.run.storages[storage].num_bytes // max(1, tensor.element_size())
        return Use(storage, min(tensor.numel(), stored), tuple(tensor.shape),
                   _is_transposed(tensor), tensor.requires_grad)

    # ---- operations ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._muted:
            self._record(func, args, kwargs or {}, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        inputs, outputs = tensor_leaves((args, kwargs)), tensor_leaves(out)
        mutable = func._schema.is_mutable
        reads = [self._use(t, self.storage_of(t)) for t in inputs]
        read_ids = {use.storage for use in reads}
        known = {t.untyped_storage()._cdata: self._ids.get(t.untyped_storage()._cdata)
                 for t in outputs}
        is_view = not mutable and bool(outputs) and all(
            index is not None and index in read_ids for index in known.values())
        if is_view or (not outputs and not mutable):
            return
        flops = 0
        counter = flop_registry.get(func._overloadpacket)
        if counter is not None:
            flops = int(counter(*args, **kwargs, out_val=out))
        if name in GATHERS and reads:
            first, size = reads[0], sum(t.numel() for t in outputs)
            reads[0] = Use(first.storage, size, first.shape, first.transposed, first.requires_grad)
        self._append(name, reads, outputs, flops, kernel=name not in _NO_KERNEL)

    def _append(self, name: str, reads: Sequence[Use], outputs: Sequence[torch.Tensor],
                flops: int, *, kernel: bool = True, attention: Any = None) -> RawOp | None:
        origin = self._origin()
        if origin is None and self._backward:  # the work of a layer that stands for another
            for tensor in outputs:
                self.storage_of(tensor)
            return None
        storages, index = self.run.storages, len(self.run.ops)
        layer, inside = self._layer, self._inside
        module, in_norm = self._modules[-1] if self._modules else ("", False)
        if origin is not None:
            served = self.run.ops[origin]
            layer, inside, module, in_norm = (served.layer, served.inside, served.module,
                                              served.in_norm)
        derived = any(storages[use.storage].derived for use in reads)
        learned = any(storages[use.storage].learned for use in reads)
        writes = []
        for tensor in outputs:
            storage = self.storage_of(tensor, index)
            storages[storage].writer = max(self._layer, 0)
            storages[storage].derived |= derived
            storages[storage].learned |= learned
            writes.append(self._use(tensor, storage))
        op = RawOp(name, max(layer, 0), inside, module, not self._backward, self._time, origin,
                   tuple(reads), tuple(writes), flops, in_norm, kernel, attention,
                   self._grouped_from if not self._backward else None)
        self.run.ops.append(op)
        self._time += 1
        if not self._backward:
            self._node_ops.setdefault(torch.autograd._get_sequence_nr() - 1, index)
        return op

    def _origin(self) -> int | None:
        if not self._backward:
            return None
        node = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            if number in self._node_ops:
                self._last_origin = self._node_ops[number]
        return self._last_origin

    def skip_node(self) -> None:
        """The backward of the newest autograd node belongs to no recorded operation."""
        self._node_ops[torch.autograd._get_sequence_nr() - 1] = None

    def attention(self, inputs: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor],
                  causal: bool) -> None:
        """Write down one fused attention."""
        tensors = [t for t in inputs if t is not None]
        query, key, value = tensors[:3]
        shape = (query.shape[-3], key.shape[-3], query.shape[-1], query.shape[-2], key.shape[-2],
                 causal)
        flops = int(sdpa_flop_count(query.shape, key.shape, value.shape))
        self._append("attention", [self._use(t, self.storage_of(t)) for t in tensors], outputs,
                     flops, attention=shape)

    def attention_backward(self, inputs: Sequence[torch.Tensor | None],
                           outputs: Sequence[torch.Tensor]) -> None:
        """Write down the backward of one fused attention: gradient, q, k, v, ... in `inputs`."""
        tensors = [t for t in inputs if t is not None]
        flops = int(sdpa_backward_flop_count(*(t.shape for t in tensors[:4])))
        self._append("attention_backward", [self._use(t, self.storage_of(t)) for t in tensors],
                     outputs, flops)

    @contextmanager
    def experts(self, hidden: torch.Tensor) -> Iterator[None]:
        """Within it, batched matmuls are grouped ones over the rows of `hidden`."""
        self._grouped_from = self.storage_of(hidden)
        try:
            yield
        finally:
            self._grouped_from = None

    # ---- modules ----

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The saved-tensor hook: 0-dim tensors are left out, they are a few bytes of statistics."""
        if not self._muted and tensor.dim() > 0:
            self.run.saved.append((self.storage_of(tensor), max(self._layer, 0), self._inside))
        return tensor

    def submodule(self, module: nn.Module, path: str, forward: Callable[..., Any]) -> Any:
        """The forward of a module that only notes where its operations come from."""
        entry = (path, "norm" in type(module).__name__.lower())

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._modules.append(entry)
            if is_experts(module):
                out = balanced_experts(module, self, *args, **kwargs)
            else:
                out = forward(*args, **kwargs)
            self._modules.pop()  # after an error it stays, and says where that was
            return out
        wrapped.__wrapped__ = forward  # type: ignore[attr-defined]  # for inspect.signature
        return wrapped

    def layer(self, path: str, forward: Callable[..., Any]) -> Any:
        """The forward of a layer: run when new, its results repeated when known."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            key = (self._signatures[path], str(spec), tuple(
                tensor_signature(leaf) if isinstance(leaf, torch.Tensor) else
                leaf if isinstance(leaf, (bool, int, float, str)) else id(leaf)
                for leaf in leaves))
            inputs = tuple(self._use(t, self.storage_of(t)) for t in tensors)
            index = len(self.run.calls)
            like, plan = self._known.get(key, (index, None))
            self.run.calls.append(call := Call(path, like, inputs, tuple(
                self.run.storages[use.storage].writer for use in inputs)))
            self._layer, self._inside = index, True
            modules, self._modules = self._modules, [("", False)]
            if plan is None:
                out = forward(*args, **kwargs)
                self._known[key] = (index, self._plan(out, tensors))
            else:
                out = self._repeat(plan, tensors)
            self._inside, self._modules = False, modules
            call.outputs = tuple(self._use(t, self.storage_of(t)) for t in tensor_leaves(out))
            return out
        wrapped.__wrapped__ = forward  # type: ignore[attr-defined]
        return wrapped

    def _plan(self, out: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[Any]]:
        leaves, spec = pytree.tree_flatten(out)
        inputs = {id(t): k for k, t in enumerate(tensors)}
        plan: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                plan.append(("value", leaf))
            elif id(leaf) in inputs:
                plan.append(("input", inputs[id(leaf)]))
            else:
                made = self.run.storages[self.storage_of(leaf)]
                plan.append(("new", (*tensor_signature(leaf), made.derived, made.learned)))
        return spec, plan

    def _repeat(self, plan: tuple[Any, list[Any]], tensors: Sequence[torch.Tensor]) -> Any:
        spec, steps = plan
        likes = [value for what, value in steps if what == "new"]
        distinct = list({id(t): t for t in tensors}.values())
        with self.muted():
            anchor = torch.empty(1, requires_grad=True)
            made = iter(_Shortcut.apply(self, likes, anchor, *distinct) if likes else ())
        leaves: list[Any] = []
        for what, value in steps:
            if what == "new":
                leaves.append(next(made))
                self.storage_of(leaves[-1], derived=value[-2], learned=value[-1])
            else:
                leaves.append(tensors[value] if what == "input" else value)
        self._time += 1
        return pytree.tree_unflatten(leaves, spec)

    def where(self) -> str:
        """The place that the forward has reached, for messages."""
        layer = self.run.calls[self._layer].path if self._inside else ""
        module = self._modules[-1][0] if self._modules else ""
        return ".".join(part for part in (layer, module) if part) or "the model's own forward"

    def start_backward(self) -> None:
        self._backward, self._last_origin = True, len(self.run.ops) - 1
