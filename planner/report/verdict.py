"""Whether a priced layout fits."""

from __future__ import annotations

from planner.layout import Layout
from planner.report.words import GIB, gib, share, term

__all__ = ["overflows"]

LARGEST = 3
"""How many terms of a stage that overflows are named."""


def overflows(layout: Layout) -> list[str]:
    """One line for each pipeline rank that needs more memory than its devices may use."""
    lines = []
    for stage in layout.prediction.stages if layout.prediction else ():
        over = stage.total_memory_bytes - stage.capacity_bytes
        if over > 0:
            largest = sorted(stage.memory_bytes.items(), key=lambda item: -item[1])[:LARGEST]
            terms = ", ".join(f"{term(name)} {gib(num_bytes)}" for name, num_bytes in largest)
            lines.append(
                f"stage {stage.pipeline_rank} on {stage.device} needs "
                f"{gib(stage.total_memory_bytes)} GiB of {gib(stage.capacity_bytes)} usable: "
                f"{_over(over)} too much ({share(over / stage.capacity_bytes)}); largest: {terms}")
    return lines


def _over(num_bytes: int) -> str:
    return f"{gib(num_bytes)} GiB" if num_bytes >= 0.01 * GIB else f"{num_bytes:,} bytes"
