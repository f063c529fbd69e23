"""Measured bytes of a layer, as the memory formula takes them.

A measurement is of the layer's module alone: what it is given and what work outside of it keeps (a
loss) are as traced. Symbols: K_r = bytes kept with recompute r, F and B = the peaks of forward and
backward without recompute, I_r = what enters and is kept, O = what outside work keeps.

    saved        K_r + I_r + O
    working set  max(F - K_none, B - K_r)     at least the traced one where there is outside work
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.capabilities import RecomputeMode
from planner.cost.compute import Shard
from planner.cost.memory import ActivationMemory, activation_memory, entering, group_bytes
from profiler.layer_graph import LayerKind
from profiler.profile import LayerBytes

__all__ = ["BytesRow", "bytes_row", "most_activations"]

BytesRow = tuple[float, ...]
"""Kept with recompute none, selective and full; peak of forward, of backward."""

_PLACES: dict[RecomputeMode, int] = {"none": 0, "selective": 1, "full": 2}


def bytes_row(row: LayerBytes) -> BytesRow:
    """The numbers of a measurement, in order."""
    return (row.kept_bytes, row.kept_selective_bytes, row.kept_full_bytes,
            row.forward_peak_bytes, row.backward_peak_bytes)


def most_activations(kind: LayerKind, recompute: RecomputeMode, shard: Shard,
                     rows: Iterable[BytesRow | None]) -> ActivationMemory:
    """What a layer keeps and works with on any of some devices; None: not measured, as traced."""
    traced = activation_memory(kind, recompute, shard)
    found = [traced if row is None else _measured(kind, recompute, shard, row, traced)
             for row in rows]
    return ActivationMemory(max(one.saved_bytes for one in found),
                            max(one.working_set_bytes for one in found))


def _measured(kind: LayerKind, recompute: RecomputeMode, shard: Shard, row: BytesRow,
              traced: ActivationMemory) -> ActivationMemory:
    kept = row[_PLACES[recompute]]
    outside = group_bytes([g for g in kind.saved if g.is_outside], shard)
    working = max(row[3] - row[0], row[4] - kept, 0.0)
    if outside:
        working = max(working, traced.working_set_bytes)
    given = group_bytes(entering(kind, recompute, shard), shard)
    return ActivationMemory(round(kept) + given + outside,
                            round(working))
