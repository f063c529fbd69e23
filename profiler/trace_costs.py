"""From the operations of one layer to its `LayerKind`: what it computes, keeps and needs.

Operations that only rename memory (views) cost nothing and are left out. Every matmul, convolution
and attention is an `Op` of its own; the rest is one `Op` per (module, kind, split). FLOPs are
those of `torch.utils.flop_counter`: matmuls, convolutions and attention only, attention in full
whether causal or not, its backward with the recomputation of the scores that a fused kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from profiler.layer_graph import (
    AttentionShape,
    Extent,
    LayerKind,
    MatmulShape,
    Op,
    Parameter,
    Split,
    TensorGroup,
    TensorParallel,
)
from profiler.trace_events import RawOp, Run, Storage, Use
from profiler.trace_fit import Fit
from profiler.trace_partition import caller_class, has_batch_statistics
from profiler.trace_split import Splits
from profiler.trace_view import LayerView, kind_of_op

__all__ = ["LayerCosts", "ParameterPlace"]

_OWN_OP = frozenset({"matmul", "convolution", "attention"})


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """One parameter of a layer, by its storage."""

    storage: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool


@dataclass(slots=True)
class LayerCosts:
    """Prices one layer from all runs.

    kept, inputs: the saved storages (and whether they stay whatever is recomputed), and those that
        enter, that this layer answers for. passed: those that some layer's module is given.
    """

    runs: Sequence[Run]
    fit: Fit
    view: LayerView
    splits: Splits
    parameters: Sequence[ParameterPlace]
    buffer_bytes: int
    kept: dict[int, bool]
    inputs: Collection[int]
    saved_anywhere: Collection[int]
    passed: Collection[int]
    is_tokens: bool
    reference: tuple[int, int]
    module: nn.Module

    @property
    def _storages(self) -> list[Storage]:
        return self.runs[0].storages

    def kind(self) -> LayerKind:
        """All of it, as the record."""
        return LayerKind(
            parameters=tuple(self._parameter(place) for place in self.parameters),
            buffer_bytes=self.buffer_bytes,
            ops=tuple(self._ops()),
            saved=self._groups(self.kept, by_module=True),
            inputs=self._groups(self.inputs, by_module=True),
            kept_only_by_selective=self._kept_only_by_selective(),
            forward_working_set=self._working_set(self.view.forward, forward=True),
            backward_working_set=self._working_set(self.view.backward, forward=False),
            tensor_parallel=self._tensor_parallel(),
            batch_statistics=has_batch_statistics(self.module))

    # ---- splits ----

    def _outer(self, split: Split) -> Split:
        """Without a sequence there is nothing outside a divided region to divide."""
        if not self.is_tokens and split in {"sequence", "gathered"}:
            return "replicated"
        return split

    def _storage_split(self, storage: int) -> Split:
        split = self.splits.storages.get(storage)
        if split is None:
            split = "sequence" if self._storages[storage].derived else "replicated"
        return self._outer(split)

    def _parameter(self, place: ParameterPlace) -> Parameter:
        found = self.splits.parameters.get(place.storage)
        return Parameter(name=place.name, shape=place.shape, dtype=place.dtype,
                         trainable=place.trainable, split=found[0] if found else "replicated",
                         split_dim=found[1] if found else None)

    def _tensor_parallel(self) -> TensorParallel | None:
        if not self.splits.divides:
            return None
        return TensorParallel(divides=dict(sorted(self.splits.divides.items())),
                              entries=tuple(self._port(*p) for p in self.splits.entries),
                              exits=tuple(self._port(*p) for p in self.splits.exits),
                              callers=self._callers(),
                              kv_parameters=tuple(p.name for p in self.parameters
                                                  if p.storage in self.splits.kv))

    def _callers(self) -> tuple[str, ...]:
        """Classes whose code is not proven to stand the division."""
        classes = {caller_class(self.module, place.name) for place in self.parameters
                   if place.storage in self.splits.unproven}
        if not self.splits.by_token:
            classes.add(type(self.module).__name__)
        return tuple(sorted(classes))

    def _port(self, index: int, side: str, position: int) -> Extent:
        return self.fit.of(lambda run: cast(Use, getattr(
            self.runs[run].ops[index], side)[position]).numel)

    # ---- operations ----

    def _ops(self) -> list[Op]:
        serving: dict[int, list[int]] = {}
        for index, op in self.view.backward:
            serving.setdefault(-1 if op.origin is None else op.origin, []).append(index)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, op in self.view.forward:
            kind, split = kind_of_op(op), self._outer(self.splits.ops[index])
            module = op.module if op.inside else op.module.rsplit(".", 1)[-1] or "outside"
            key = (module, kind, split, index if kind in _OWN_OP else -1)
            groups.setdefault(key, []).append(index)
        ops, names = [], set[str]()
        for (module, kind, split, _), members in groups.items():
            name = f"{module}.{kind}" if module else kind
            number = 2
            while name in names:
                name, number = f"{name.split('#')[0]}#{number}", number + 1
            names.add(name)
            backward = [index for member in members for index in serving.get(member, ())]
            ops.append(self._op(name, kind, split, members, backward))
        return ops

    def _op(self, name: str, kind: Any, split: Split, forward: list[int],
            backward: list[int]) -> Op:
        first = self.runs[0].ops[forward[0]]
        return Op(
            name=name, kind=kind, split=split,
            flops=self._sum(forward, lambda run, op: op.flops),
            backward_flops=self._sum(backward, lambda run, op: op.flops),
            elements_moved=self._sum(forward, _elements),
            bytes_moved=self._sum(forward, _fixed_bytes),
            backward_elements_moved=self._sum(backward, _elements),
            backward_bytes_moved=self._sum(backward, _fixed_bytes),
            kernels=sum(self.runs[0].ops[index].kernel for index in forward),
            backward_kernels=sum(self.runs[0].ops[index].kernel for index in backward),
            matmul=self._matmul(forward[0]) if kind == "matmul" else None,
            attention=self._attention(forward[0]) if first.attention else None)

    def _sum(self, indices: list[int], count: Callable[[Run, RawOp], int]) -> Extent:
        return self.fit.of(lambda i: sum(
            count(self.runs[i], self.runs[i].ops[index]) for index in indices))

    def _matmul(self, index: int) -> MatmulShape:
        def dims(run: int) -> tuple[int, int, int, int]:
            op = self.runs[run].ops[index]
            left, right = op.reads[-2].shape, op.reads[-1].shape
            columns = right[-1] if len(right) > 1 else 1
            rows = left[-2] if len(left) > 1 else 1
            batch = left[0] if len(left) == 3 else 1
            if op.grouped_from is not None:
                return rows * batch, columns, left[-1], 1
            return rows, columns, left[-1], batch

        op = self.runs[0].ops[index]
        rows, columns, inner, batch = (self.fit.of(lambda run, k=k: dims(run)[k])  # type: ignore
                                       for k in range(4))
        groups = op.reads[-1].shape[0] if op.grouped_from is not None else 1
        return MatmulShape(rows=rows, columns=columns, inner=inner, batch=batch, groups=groups)

    def _attention(self, index: int) -> AttentionShape:
        def part(position: int) -> Callable[[int], int]:
            return lambda run: int((self.runs[run].ops[index].attention or (0,) * 6)[position])

        heads, kv_heads, head_dim, _, _, causal = self.runs[0].ops[index].attention or (0,) * 6
        return AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                              queries=self.fit.of(part(3)), keys=self.fit.of(part(4)),
                              causal=bool(causal))

    # ---- memory ----

    def _size(self, storages: Iterable[int]) -> Extent:
        members = tuple(storages)
        return self.fit.of(lambda i: sum(
            s.num_bytes // s.itemsize for s in (self.runs[i].storages[m] for m in members)))

    def _producer(self, storage: int) -> RawOp | None:
        made = self._storages[storage]
        if made.creator is None or not self.view.is_own(made):
            return None
        return self.runs[0].ops[made.creator]

    def _copied(self, storage: int) -> int | None:
        """The storage of the compute dtype that this is a copy in float32 of."""
        producer, made = self._producer(storage), self._storages[storage]
        if (producer is None or producer.name != "_to_copy" or not made.fixed_dtype
                or made.itemsize != 4):
            return None
        source = producer.reads[0].storage
        return None if self._storages[source].fixed_dtype else source

    def _is_product(self, storage: int) -> bool:
        producer = self._producer(storage)
        return producer is not None and kind_of_op(producer) in {"matmul", "attention"}

    def _groups(self, storages: Iterable[int], *, by_module: bool) -> tuple[TensorGroup, ...]:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for storage in storages:
            made = self._storages[storage]
            if made.num_bytes == 0:
                continue
            producer = self._producer(storage)
            is_input = not self.view.is_own(made)
            if is_input:
                name = "input"
            elif producer is None or not by_module:
                name = "activations"
            elif producer.attention:
                name = f"{producer.module}.attention".lstrip(".")
            else:
                name = (producer.module if producer.inside else "") or "outside"
            size = made.itemsize if made.fixed_dtype else None
            source = self._copied(storage) if by_module else None
            saved_too = source is not None and source in self.saved_anywhere
            given = source is not None and not self.view.is_own(self._storages[source])
            key = (name, self._storage_split(storage), size,
                   by_module and self._is_product(storage), by_module and is_input,
                   by_module and self.kept.get(storage, False),
                   saved_too, given and not saved_too and not is_input)
            groups.setdefault(key, []).append(storage)
        return tuple(
            TensorGroup(name=name, split=split, bytes_per_element=size, kept_by_selective=product,
                        is_input=is_input, is_outside=outside, is_copy=is_copy,
                        is_copy_of_input=of_input, elements=self._size(members))
            for (name, split, size, product, is_input, outside, is_copy, of_input), members
            in groups.items())

    def _kept_only_by_selective(self) -> tuple[TensorGroup, ...]:
        """Of the module alone, and nothing where it has no backward; what another layer is given,
        that one keeps."""
        extra = {use.storage: None for _, op in self.view.forward
                 if op.inside and kind_of_op(op) in {"matmul", "attention"} for use in op.writes
                 if self.view.backward and use.storage not in self.saved_anywhere
                 and use.storage not in self.passed}
        return self._groups(extra, by_module=True)

    def _working_set(self, ops: Sequence[tuple[int, RawOp]], *,
                     forward: bool) -> tuple[TensorGroup, ...]:
        """What is alive when the bytes alive at the reference point are most."""
        run = self.runs[0]
        ignored = set(run.parameters) | run.buffers
        touched = {use.storage for _, op in ops for use in op.reads + op.writes} - ignored
        kept = set(self.view.saved) | set(self.kept)
        sizes = {s: self._bytes(s) for s in touched | kept}
        others = {s for s in touched - kept
                  if not self._is_parameter_gradient(s, forward)
                  and (s not in self.saved_anywhere or self.view.is_own(self._storages[s]))}
        best, peak = -1, set[int]()
        for _, op in ops:
            alive = {s for s in others if self._alive(s, op.time)}
            held = kept if forward else {s for s in kept if self._alive(s, op.time)}
            total = sum(sizes[s] for s in alive) + sum(sizes[s] for s in held)
            if total > best:
                best, peak = total, alive
        split_of = None if forward else self._gradient_splits(ops)
        return self._working_groups(sorted(peak), split_of)

    def _working_groups(self, storages: Iterable[int],
                        split_of: dict[int, Split] | None) -> tuple[TensorGroup, ...]:
        groups: dict[tuple[Split, int | None], list[int]] = {}
        for storage in storages:
            made = self._storages[storage]
            if made.num_bytes == 0:
                continue
            split = self._storage_split(storage) if split_of is None else split_of.get(
                storage, self._outer("sequence"))
            size = made.itemsize if made.fixed_dtype else None
            groups.setdefault((split, size), []).append(storage)
        return tuple(TensorGroup(name="gradients" if split_of is not None else "activations",
                                 split=split, bytes_per_element=size, elements=self._size(members))
                     for (split, size), members in groups.items())

    def _gradient_splits(self, ops: Sequence[tuple[int, RawOp]]) -> dict[int, Split]:
        """A gradient is divided as what the forward operation read: whole before a column."""
        inner: dict[Split, Split] = {"column": "gathered", "row": "feature", "heads": "feature"}
        splits: dict[int, Split] = {}
        for _, op in ops:
            split = self.splits.ops.get(op.origin if op.origin is not None else -1, "sequence")
            if split == "vocabulary" and "matmul" in kind_of_op(op) and op.writes:
                split = "column"
            for use in op.writes:
                splits.setdefault(use.storage, self._outer(inner.get(split, split)))
        return splits

    def _bytes(self, storage: int) -> int:
        made = self._storages[storage]
        size = made.itemsize if made.fixed_dtype else 2
        return self._size((storage,)).at(*self.reference) * size

    def _alive(self, storage: int, time: int) -> bool:
        made = self._storages[storage]
        return made.made_at <= time and (made.freed is None or made.freed > time)

    def _is_parameter_gradient(self, storage: int, forward: bool) -> bool:
        """Of a parameter's size, whatever the input: counted with the gradients, not here."""
        if forward:
            return False
        size = self._size((storage,))
        constant = size.per_sample == (0, 0, 0) and size.fixed[1:] == (0, 0)
        counts = {p.shape for p in self.parameters}
        return constant and size.fixed[0] in {_count(shape) for shape in counts}


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for dim in shape:
        total *= dim
    return total


def _elements(run: Run, op: RawOp) -> int:
    if not op.kernel:
        return 0
    return sum(use.numel for use in op.reads + op.writes
               if not run.storages[use.storage].fixed_dtype)


def _fixed_bytes(run: Run, op: RawOp) -> int:
    if not op.kernel:
        return 0
    return sum(use.numel * run.storages[use.storage].itemsize for use in op.reads + op.writes
               if run.storages[use.storage].fixed_dtype)
