"""Predicted beside measured, when a training run is over."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

import torch.distributed as dist

from executor.metrics import Metrics
from executor.run import Run
from planner.layout import Layout, Prediction
from profiler.documents import write_atomically
from profiler.errors import MeshwrightError
from profiler.layer_graph import LayerGraph

__all__ = ["SETTLING", "print_summary", "with_prediction"]

SETTLING = 2
"""First steps left out of what was measured: they allocate and connect."""


def with_prediction(layout: Layout, graph: LayerGraph) -> Layout:
    """The layout, priced if it is not (one written by hand); as it is if its topology is unknown.
    """
    if layout.prediction is not None:
        return layout
    from planner.inputs import check

    try:
        return replace(layout, prediction=check(layout, model=graph).layout.prediction)
    except MeshwrightError:
        return layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A quantity (seconds or bytes) as it was predicted and measured; None where it was not."""

    name: str
    unit: Literal["s", "bytes"]
    predicted: float | None
    measured: float | None


def print_summary(run: Run, history: list[Metrics], report: str | None = None) -> None:
    """Print the table on rank 0, and write it to `report`. Every rank calls it."""
    peak = history[-1].peak_memory_bytes if history else None
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (run.mesh.coordinate("pp"), peak, run.clock.micro_batch_s()))
    if run.mesh.rank != 0 or not history:
        return
    settled = history[SETTLING:] or history
    prediction = run.layout.prediction
    rows = [Row(name="step", unit="s", measured=median(m.step_s for m in settled),
                predicted=prediction.step_s if prediction else None)]
    for place in range(run.layout.mesh.pp):
        rows += _stage_rows(place, [item for item in every if item[0] == place], prediction)
    print(f"\n{'':<36}{'predicted':>12}{'measured':>12}{'measured/predicted':>20}")
    for row in rows:
        ratio = f"{row.measured / row.predicted:.2f}" if row.measured and row.predicted else "-"
        print(f"{row.name:<36}{_shown(row.predicted, row.unit):>12}"
              f"{_shown(row.measured, row.unit):>12}{ratio:>20}")
    print(f"measured: median of the last {len(settled)} of {len(history)} steps; peak of the "
          f"fullest rank{_memory_note(run)}", flush=True)
    if report is not None:
        text = json.dumps({"num_steps": len(settled), "rows": [asdict(row) for row in rows]},
                          indent=1)
        write_atomically(report, text + "\n")


def _stage_rows(place: int, ranks: list[Any], prediction: Prediction | None) -> list[Row]:
    """Time of a micro-batch and peak memory of the ranks of one pipeline place."""
    stage = next((s for s in prediction.stages if s.pipeline_rank == place), None) \
        if prediction else None
    peaks = [peak for _, peak, _ in ranks if peak is not None]
    spans = [span for _, _, span in ranks if span is not None]
    name = f"pipeline rank {place}"
    return [Row(name=f"{name}, a micro-batch", unit="s", measured=max(spans, default=None),
                predicted=sum(stage.micro_batch_s.values()) if stage else None),
            Row(name=f"{name}, peak memory", unit="bytes", measured=max(peaks, default=None),
                predicted=stage.total_memory_bytes if stage else None)]


def _memory_note(run: Run) -> str:
    if run.mesh.device.type == "cuda":
        return ""
    return ",\nas the resident set of its process, with Python and its libraries"


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return f"{value / 2**30:.2f} GiB"
    return f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"
