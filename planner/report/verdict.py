"""Whether a priced layout fits."""

from __future__ import annotations

from planner.layout import Layout, StagePrediction
from planner.report.words import GIB, gib, share, term

__all__ = ["overflows"]

LARGEST = 3
"""How many terms of a stage that overflows are named."""

WORST = 4
"""How many stages that overflow are named."""


def overflows(layout: Layout) -> list[str]:
    """A line for each pipeline rank that needs more memory than it may use, worst first."""
    stages = layout.prediction.stages if layout.prediction else ()
    over = [stage for stage in stages if _excess(stage) > 0]
    over.sort(key=lambda stage: -_excess(stage) / stage.capacity_bytes)
    lines = [_line(stage) for stage in over[:WORST]]
    if len(over) > WORST:
        lines.append(f"and {len(over) - WORST} more stages")
    return lines


def _excess(stage: StagePrediction) -> int:
    return stage.total_memory_bytes - stage.capacity_bytes


def _line(stage: StagePrediction) -> str:
    largest = sorted(stage.memory_bytes.items(), key=lambda item: -item[1])[:LARGEST]
    terms = ", ".join(f"{term(name)} {gib(num_bytes)}" for name, num_bytes in largest)
    excess = _excess(stage)
    return (f"stage {stage.pipeline_rank} on {stage.device} needs "
            f"{gib(stage.total_memory_bytes)} GiB of {gib(stage.capacity_bytes)} usable: "
            f"{_over(excess)} too much ({share(excess / stage.capacity_bytes)}); largest: {terms}")


def _over(num_bytes: int) -> str:
    return f"{gib(num_bytes)} GiB" if num_bytes >= 0.01 * GIB else f"{num_bytes:,} bytes"
