"""Two pictures of the errors: predicted against measured, and the errors of each source."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.price import Priced
from profiler.documents import write_atomically
from profiler.errors import InvalidInput

__all__ = ["draw"]


def draw(groups: Mapping[str, Sequence[Priced]], folder: Path) -> list[Path]:
    """Write both pictures; returns their paths.

    Raises:
        InvalidInput: there is no matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise InvalidInput("pictures need matplotlib: pip install 'meshwright[reports]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 7))
    for index, (source, rows) in enumerate(groups.items()):
        axes.scatter([r.measured_s for r in rows], [r.predicted_s for r in rows], s=14, alpha=0.6,
                     label=f"{source} ({len(rows)})", color=pyplot.colormaps["tab20"](index % 20))
    every = [s for rows in groups.values() for r in rows for s in (r.measured_s, r.predicted_s)]
    ends = [min(every), max(every)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured step (s)", ylabel="predicted step (s)")
    axes.legend(fontsize=7)
    paths = [folder / "predicted_against_measured.png", folder / "error_by_source.png"]
    _save(figure, paths[0])

    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(groups) + 1.5))
    axes.boxplot([[100 * r.error for r in rows] for rows in groups.values()],
                 orientation="horizontal", tick_labels=list(groups), showfliers=True,
                 flierprops={"markersize": 3})
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("error of the predicted step time (%)")
    _save(figure, paths[1])
    return paths


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130, bbox_inches="tight")
    pyplot.close(figure)
    write_atomically(path, drawn.getvalue())
