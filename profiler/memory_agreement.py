"""Measured bytes against traced ones."""

from __future__ import annotations

from profiler.layer_graph import LayerGraph
from profiler.profile import Profile

__all__ = ["saved_bytes_ratio"]

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def saved_bytes_ratio(graph: LayerGraph, profile: Profile) -> float | None:
    """Saved-for-backward bytes of the whole model's layers, measured over traced, at degree 1.

    What work outside of layers keeps is in neither. None where nothing was measured.
    """
    counts: dict[str, int] = {}
    for layer in graph.layers:
        counts[layer.kind] = counts.get(layer.kind, 0) + 1
    measured = traced = 0
    for row in profile.memory:
        if row.tensor_parallel == 1:
            groups = [g for g in graph.kinds[row.kind].saved if not g.is_outside]
            measured += counts[row.kind] * sum(tensor.num_bytes for tensor in row.saved)
            traced += counts[row.kind] * sum(
                g.bytes_at(row.micro_batch, row.seq_len, ITEMSIZE[profile.dtype]) for g in groups)
    return measured / traced if traced else None
