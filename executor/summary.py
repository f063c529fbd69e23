"""Predicted beside measured, when a training run is over."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import torch.distributed as dist

from executor.metrics import Metrics
from executor.run import Run
from planner.layout import Layout, Prediction
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


def print_summary(run: Run, history: list[Metrics]) -> None:
    """Print the table on rank 0. Every rank calls it."""
    peak = history[-1].peak_memory_bytes if history else None
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (run.mesh.coordinate("pp"), peak, run.clock.micro_batch_s()))
    if run.mesh.rank != 0 or not history:
        return
    settled = history[SETTLING:] or history
    rows = [("step", "s", median(m.step_s for m in settled),
             run.layout.prediction.step_s if run.layout.prediction else None)]
    for place in range(run.layout.mesh.pp):
        rows += _stage_rows(place, [item for item in every if item[0] == place],
                            run.layout.prediction)
    print(f"\n{'':<42}{'predicted':>12}{'measured':>12}{'measured/predicted':>20}")
    for name, unit, measured, forecast in rows:
        ratio = f"{measured / forecast:.2f}" if measured and forecast else "-"
        print(f"{name:<42}{_shown(forecast, unit):>12}{_shown(measured, unit):>12}{ratio:>20}")
    print(f"measured: median of the last {len(settled)} of {len(history)} steps; peak of the "
          f"fullest rank{_memory_note(run)}", flush=True)


def _stage_rows(place: int, ranks: list[Any], prediction: Prediction | None) -> list[Any]:
    """Time of a micro-batch and peak memory of the ranks of one pipeline place."""
    stage = next((s for s in prediction.stages if s.pipeline_rank == place), None) \
        if prediction else None
    peaks = [peak for _, peak, _ in ranks if peak is not None]
    spans = [span for _, _, span in ranks if span is not None]
    name = f"pipeline rank {place}"
    return [(f"{name}, a micro-batch", "s", max(spans, default=None),
             sum(stage.micro_batch_s.values()) if stage else None),
            (f"{name}, peak memory", "GiB", max(peaks, default=None),
             stage.total_memory_bytes if stage else None)]


def _memory_note(run: Run) -> str:
    if run.mesh.device.type == "cuda":
        return ""
    return ",\nas the resident set of its process, with Python and its libraries"


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "GiB":
        return f"{value / 2**30:.2f} GiB"
    return f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"
