"""Samples per second of the plan on 1, 2, 4 and 8 processes, against linear scaling.

Every process has the same fixed share of a core whatever their number, and the same number of
samples (weak scaling), so that linear scaling is a step of constant length. What a step takes
longer than on one process is split twice: as predicted, into the named terms of the step; as
measured, into processor time (of the process that used most, over its share) and waiting for links
or for other processes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.hand_tuned.beds import without_limits
from benchmarks.hand_tuned.contest import FULL, run_scenario
from benchmarks.hand_tuned.scenarios import Processes, Scenario
from benchmarks.testbed import why_unavailable
from profiler.documents import read_data, write_atomically

__all__ = ["POINTS", "points_of", "scaling"]

SHARE = 0.25
SAMPLES = 2
"""A step, of each process."""

POINTS = tuple(
    Scenario(name=f"scaling, {number} processes", why="the same work for each process",
             model="gpt", link_gbit_per_s=1.0, global_batch=SAMPLES * number,
             hosts=(Processes(count=-(-number // 4), core_share=SHARE),) * min(number, 4))
    for number in (1, 2, 4, 8))


def points_of(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each number of processes: shares of linear, and what takes the rest.

    results: of `run_scenario`, by increasing number of processes.
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        plan, scenario = result["rows"][0], result["scenario"]
        number = sum(host["count"] for host in scenario["hosts"])
        step_s = plan["measured_s"]
        busy_s = max(plan["cpu_s"]) / scenario["hosts"][0]["core_share"]
        row = {"processes": number, "degrees": plan["degrees"], "step_s": step_s,
               "samples_per_s": scenario["global_batch"] / step_s,
               "predicted_s": plan["predicted_s"], "terms_s": plan["predicted_terms_s"],
               "busy_s": min(busy_s, step_s), "waiting_s": max(0.0, step_s - busy_s)}
        first = rows[0] if rows else row
        row["linear"] = first["step_s"] / step_s
        row["predicted_linear"] = first["predicted_s"] / row["predicted_s"]
        row["predicted_rest"] = _largest({name: seconds - first["terms_s"].get(name, 0.0)
                                          for name, seconds in row["terms_s"].items()})
        row["measured_rest"] = _largest({
            "waiting for links or others": row["waiting_s"] - first["waiting_s"],
            "processor time": row["busy_s"] - first["busy_s"]})
        rows.append(row)
    return rows


def _largest(growth: dict[str, float]) -> str:
    """The term that grew most, with its seconds; nothing where none grew."""
    name = max(growth, key=lambda term: growth[term])
    return f"{name.replace('_', ' ')} +{growth[name]:.2f} s" if growth[name] > 0 else ""


def scaling(folder: Path, *, again: bool = False) -> int:
    """Measure what is not kept, print the table and draw it."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "scaling.json"
    kept: dict[str, Any] = read_data(path)["points"] if path.exists() and not again else {}
    limited = why_unavailable() is None
    if not limited:
        console.print(f"no test bed here ({why_unavailable()}): the processes share the cores, so "
                      "that scaling ends where the cores do")
    for scenario in POINTS:
        if scenario.name not in kept:
            kept[scenario.name] = run_scenario(
                scenario if limited else without_limits(scenario), folder, FULL, limited=limited,
                only_plan=True)
            write_atomically(path, json.dumps({"points": kept}, indent=1) + "\n")
    rows = points_of([kept[scenario.name] for scenario in POINTS])
    _print(rows, console)
    from benchmarks.hand_tuned.pictures import draw_scaling

    draw_scaling(rows, folder / "scaling.png")
    return 0


def _print(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"The plan on more processes, {SHARE:g} of a core and {SAMPLES} samples "
                        "each", title_style="")
    for heading in ("processes", "the plan", "samples/s", "of linear", "predicted",
                    "what takes the rest, measured", "predicted"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(str(row["processes"]), row["degrees"], f"{row['samples_per_s']:.2f}",
                      f"{row['linear']:.0%}", f"{row['predicted_linear']:.0%}",
                      row["measured_rest"], row["predicted_rest"])
    console.print(table)
