"""The report of `plan scale`: a table, and a plot of throughput against devices."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.layout import Layout
from planner.report import WIDTH
from planner.report.tables import figures
from planner.report.words import printable, scaled, seconds, share, term
from planner.scale import ScalePoint
from profiler.documents import to_data, write_atomically
from profiler.errors import InvalidInput

__all__ = ["as_data", "check_plot", "print_scale", "write_plot"]

SUFFIXES = (".png", ".svg", ".pdf")


def print_scale(points: Sequence[ScalePoint], model: str, preset: str) -> None:
    """A row for each number of devices."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH,
                      markup=False, highlight=False, emoji=False, soft_wrap=False)
    console.print(f"{printable(model)} on {printable(preset)}: fastest proven layouts")
    right = ("devices", "batch", "step", "samples/s", "linear")
    table = figures("devices", "batch", "mesh", "step", "samples/s", "linear", "limiting term",
                    right=right, unbroken=(*right, "mesh"))
    for point in points:
        table.add_row(*_cells(point))
    console.print(table)
    base = next((p for p in points if p.layout is not None), None)
    if base is not None:
        console.print(
            f"linear: samples/s per device, against that of {base.num_devices:,} devices; limiting "
            "term: the part of the step whose device-seconds per sample grew most since then, and "
            "by what share of all of them")


def _cells(point: ScalePoint) -> tuple[str, ...]:
    devices, batch = f"{point.num_devices:,}", f"{point.global_batch:,}"
    if point.layout is None:
        return devices, batch, "does not fit", "", "", "", ""
    prediction = point.layout.prediction
    assert prediction is not None and point.linear is not None
    limiting = "" if point.limiting is None else (
        f"{term(point.limiting)} +{share(point.limiting_share or 0.0)}")
    return (devices, batch, mesh(point.layout), seconds(prediction.step_s),
            scaled(prediction.samples_per_s), share(point.linear), limiting)


def mesh(layout: Layout) -> str:
    """The degrees of a layout in a few characters."""
    names = {"pp": "pp", "dp_replicate": "dp", "dp_shard": "fsdp", "tp": "tp"}
    parts = [f"{short}{layout.mesh.degree(axis)}" for axis, short in names.items()  # type: ignore[arg-type]
             if layout.mesh.degree(axis) > 1]  # type: ignore[arg-type]
    if layout.schedule.chunks > 1:
        parts.append(f"x{layout.schedule.chunks}")
    return " ".join(parts) or "one device"


def as_data(points: Sequence[ScalePoint]) -> list[dict[str, Any]]:
    """The points as plain data for JSON, with the layouts whole."""
    return [{"num_devices": p.num_devices, "global_batch": p.global_batch,
             "problem": p.problem or None, "linear": p.linear, "limiting": p.limiting,
             "limiting_share": p.limiting_share,
             "layout": None if p.layout is None else to_data(p.layout)} for p in points]


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be drawn before anything is planned.

    Raises:
        InvalidInput: another kind of file, or nothing to draw with.
    """
    if path.suffix not in SUFFIXES:
        raise InvalidInput(f"{path}: a plot is one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidInput(f"{path}: drawing a plot needs matplotlib: "
                           "pip install 'meshwright[reports]'") from None


def write_plot(path: Path, points: Sequence[ScalePoint], model: str, preset: str) -> None:
    """Samples per second against devices, with linear scaling beside it."""
    from matplotlib.figure import Figure

    shown = [p for p in points if p.layout is not None and p.layout.prediction is not None]
    if not shown:
        raise InvalidInput(f"{path}: nothing to draw, the model fits on none of these devices")
    devices = [p.num_devices for p in shown]
    rates = [p.layout.prediction.samples_per_s for p in shown]  # type: ignore[union-attr]
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes, share_axes = figure.subplots(1, 2)
    axes.plot(devices, [rates[0] / devices[0] * n for n in devices], "--", color="0.6",
              label="linear")
    axes.plot(devices, rates, "o-", color="tab:blue", label="fastest layout (predicted)")
    axes.set(yscale="log", ylabel="samples per second")
    axes.legend()
    share_axes.axhline(100, linestyle="--", color="0.6")
    share_axes.plot(devices, [100 * (p.linear or 0.0) for p in shown], "o-", color="tab:blue")
    share_axes.set(ylabel="% of linear scaling", ylim=(0, None))
    for place in (axes, share_axes):
        place.set(xscale="log", xlabel="devices")
        place.set_xticks(devices, [f"{n:,}" for n in devices], rotation=45)
        place.minorticks_off()
        place.grid(alpha=0.3)
    figure.suptitle(f"{model} on {preset}")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=150)
    write_atomically(path, drawn.getvalue())
