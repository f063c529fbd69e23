"""Whether a tensor-parallel degree can divide a layer, by its sizes and by what the target runs."""

from __future__ import annotations

from planner.capabilities import Capabilities
from profiler.layer_graph import LayerGraph, LayerKind

__all__ = ["divisible", "has_outside_parameters", "indivisible_classes", "kv_copies",
           "kv_parameters", "tie_divides"]


def divisible(kind: LayerKind, tp: int, capabilities: Capabilities) -> list[str]:
    """Why a layer cannot be divided over `tp` ranks; empty if it can (or has nothing to divide)."""
    split = kind.tensor_parallel
    if split is None:
        return []
    problems = []
    for name, size in split.divides.items():
        if name == "vocabulary" and capabilities.pad_vocabulary:
            continue
        if (name == "kv_heads" and capabilities.replicate_kv_heads and split.kv_parameters
                and tp % size == 0):
            continue
        if size % tp:
            problems.append(f"{name} {size} is not divisible by {tp}")
    unknown = indivisible_classes(kind, capabilities)
    if unknown:
        problems.append(f"{capabilities.target} does not know how to divide {', '.join(unknown)}")
    return problems


def indivisible_classes(kind: LayerKind, capabilities: Capabilities) -> list[str]:
    """Classes of a layer that count on whole heads, and that the target does not know."""
    known = capabilities.tensor_parallel_classes
    if kind.tensor_parallel is None or known is None:
        return []
    return [name for name in kind.tensor_parallel.callers if name not in known]


def kv_parameters(kind: LayerKind) -> tuple[str, ...]:
    """Names of the parameters that make keys and values alone."""
    return () if kind.tensor_parallel is None else kind.tensor_parallel.kv_parameters


def kv_copies(kind: LayerKind, tp: int) -> int:
    """Ranks that compute each KV head; 1 where nothing is divided by heads."""
    return 1 if kind.tensor_parallel is None else kind.tensor_parallel.kv_copies(tp)


def tie_divides(graph: LayerGraph, group: int, tp: int, capabilities: Capabilities) -> bool:
    """Whether a tied parameter can be divided (or none of its layers has anything to divide).

    All layers that hold it must be divided alike.
    """
    kinds = [graph.kind_of(layer) for layer, _ in graph.ties[group].places]
    return all(kind.tensor_parallel is None for kind in kinds) or all(
        kind.tensor_parallel is not None and not divisible(kind, tp, capabilities)
        for kind in kinds)


def has_outside_parameters(graph: LayerGraph) -> bool:
    """Whether some parameter lies outside every layer (its name starts with "/")."""
    return any(parameter.name.startswith("/") for kind in graph.kinds.values()
               for parameter in kind.parameters)
