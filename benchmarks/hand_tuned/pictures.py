"""Pictures of the contest and of the scaling measurement (PNG; needs matplotlib)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiler.documents import write_atomically

__all__ = ["draw_contest", "draw_scaling"]

COLOURS = {"plan": "#d62728", "hand": "#1f77b4", "random": "#aaaaaa"}


def draw_contest(results: Sequence[dict[str, Any]], path: Path) -> bool:
    """Throughput of every layout in each scenario, as a share of the best; False without
    matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.42 * len(results)))
    for place, result in enumerate(results):
        ran = [row for row in result["rows"] if row["measured_s"] is not None]
        best = min(row["measured_s"] for row in ran)
        for kind in ("random", "hand", "plan"):
            shares = [best / row["measured_s"] for row in ran if row["kind"] == kind]
            axes.scatter(shares, [place] * len(shares), color=COLOURS[kind], zorder=3,
                         marker="D" if kind == "plan" else "o", s=60 if kind == "plan" else 26,
                         label={"plan": "the plan", "hand": "hand-tuned", "random": "random"}[kind]
                         if place == 0 else None)
    axes.set_yticks(range(len(results)), [result["name"] for result in results])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05)
    axes.set_xlabel("samples per second, as a share of the fastest that ran")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower left")
    figure.tight_layout()
    _save(figure, path)
    pyplot.close(figure)
    return True


def draw_scaling(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Samples per second against processes, measured, predicted and linear; False without
    matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    numbers = [row["processes"] for row in rows]
    measured = [row["samples_per_s"] for row in rows]
    predicted = [row["samples_per_s"] * row["step_s"] / row["predicted_s"] for row in rows]
    axes.plot(numbers, [measured[0] * n / numbers[0] for n in numbers], color="#aaaaaa",
              linestyle="--", label="linear")
    axes.plot(numbers, predicted, color="#1f77b4", marker="o", label="predicted")
    axes.plot(numbers, measured, color="#d62728", marker="D", label="measured")
    axes.set_xticks(numbers)
    axes.set_xlabel("processes, each with the same share of a core and of the samples")
    axes.set_ylabel("samples per second")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    _save(figure, path)
    pyplot.close(figure)
    return True


def _save(figure: Any, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_atomically(path, buffer.getvalue())
