"""Measured bytes beside traced ones.

A measurement is of a layer's module alone. What it is given, another layer made; what is kept or
needed by work outside of it (a loss) is traced only: such kinds are marked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from profiler.layer_graph import LayerGraph, LayerKind, TensorGroup
from profiler.profile import LayerBytes, Profile

__all__ = ["Agreement", "agreement_lines", "agreements"]

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
SAVED_LIMIT, OTHER_LIMIT = 0.02, 0.10
"""Differences above these are marked."""
MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One quantity of one kind of layer, in bytes. limit: the difference that is worth a mark.

    has_outside: work outside of the layer's module, which is not measured, has its part in what was
        traced.
    """

    kind: str
    quantity: str
    traced: int
    measured: int
    limit: float = OTHER_LIMIT
    has_outside: bool = False

    @property
    def differs(self) -> bool:
        return abs(self.measured - self.traced) > self.limit * max(self.traced, 1)


def agreements(graph: LayerGraph, profile: Profile) -> tuple[Agreement, ...]:
    """Of every kind, at degree 1 and the largest size that was measured of it."""
    rows: dict[str, LayerBytes] = {}
    for row in profile.memory:
        known = rows.get(row.kind)
        if row.tensor_parallel == 1 and (known is None or _size(row) >= _size(known)):
            rows[row.kind] = row
    found = [one for name, row in rows.items()
             for one in _of_kind(name, graph.kinds[name], row, ITEMSIZE[profile.dtype])]
    for update in profile.updates:
        stored = update.num_parameters * ITEMSIZE[update.stored_dtype]
        found.append(Agreement(
            kind=f"{update.optimizer}, {update.stored_dtype}", quantity="optimizer temporaries",
            traced=0 if update.fused else stored, measured=update.temporary_bytes))
    return tuple(found)


def _size(row: LayerBytes) -> int:
    return row.micro_batch * row.seq_len


def _of_kind(name: str, kind: LayerKind, row: LayerBytes, itemsize: int) -> Iterable[Agreement]:
    def total(groups: Iterable[TensorGroup]) -> int:
        return sum(g.bytes_at(row.micro_batch, row.seq_len, itemsize) for g in groups)

    own = [g for g in kind.saved if not g.is_given(itemsize) and not g.is_outside]
    saved = total(own)
    selective = total([*(g for g in own if g.kept_by_selective), *kind.kept_only_by_selective])
    outside = any(g.is_outside for g in kind.saved)
    for quantity, traced, measured in (
            ("saved", saved, row.kept_bytes),
            ("saved, selective recompute", selective, row.kept_selective_bytes)):
        yield Agreement(kind=name, quantity=quantity, traced=traced, measured=measured,
                        limit=SAVED_LIMIT)
    for quantity, groups, peak in (
            ("forward", kind.forward_working_set, row.forward_peak_bytes),
            ("backward", kind.backward_working_set, row.backward_peak_bytes)):
        working = total(groups)
        yield Agreement(kind=name, quantity=f"{quantity} working set", traced=working,
                        measured=max(0, peak - row.kept_bytes), has_outside=outside)
        yield Agreement(kind=name, quantity=f"{quantity} peak", traced=saved + working,
                        measured=peak, has_outside=outside)


def agreement_lines(graph: LayerGraph, profile: Profile) -> list[str]:
    """The same as a table."""
    found = agreements(graph, profile)
    if not found:
        return []
    width = max(len(one.kind) for one in found)
    lines = [f"{'memory, MiB':{width}}  {'':26}  {'traced':>10}  {'measured':>10}  {'ratio':>6}"]
    for one in found:
        ratio = f"{one.measured / one.traced:6.3f}" if one.traced else f"{'':6}"
        note = "  differs" if one.differs else ""
        note += ", traced with work outside of the module" if note and one.has_outside else ""
        lines.append(f"{one.kind:{width}}  {one.quantity:26}  {one.traced / MEBIBYTE:10.2f}  "
                     f"{one.measured / MEBIBYTE:10.2f}  {ratio}{note}")
    lines.append(f"Planning takes the measured ones ('differs': by more than {SAVED_LIMIT:.0%} of "
                 f"what is saved, {OTHER_LIMIT:.0%} of the rest), and the traced ones for sizes "
                 "that were not measured and for work outside of layers.")
    return lines

