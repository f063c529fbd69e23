"""On paper: published recipes, as predicted and as measured, beside the plan for the same run.

A recipe is a row of a table of published measurements (`benchmarks/published`); its model, cluster,
batch, precision and software stack are the row's, and so are those of the plan. Llama 3 405B is in
`llama3.csv`: the paper says FLOP/s, from which its step time follows (6 N and causal attention a
token).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.hand_tuned.paper import degrees, what_changed
from benchmarks.published.adapter import make_case
from benchmarks.published.price import measured_seconds, price_case
from benchmarks.published.table import UnusableRow, measured_rows
from planner import search
from planner.layout import Layout
from profiler.documents import to_data, write_atomically
from profiler.errors import MeshwrightError

__all__ = ["RECIPES", "Compared", "compare_published", "published"]

TABLES = (Path(__file__).parents[1] / "published" / "measured.csv",
          Path(__file__).with_name("llama3.csv"))

RECIPES: dict[str, str] = {
    **{f"sc21_tab1-{n:04d}": "Megatron (SC21)" for n in range(1, 11)},
    "torchtitan-0001": "torchtitan, 1-D", "torchtitan-0004": "torchtitan, 1-D",
    "torchtitan-0035": "torchtitan, 70B", "torchtitan-0043": "torchtitan, 2-D",
    "torchtitan-0013": "torchtitan, 3-D", "llama3_tab4-0002": "Llama 3 paper",
}
"""Row of a table -> whose recipe it is."""

TIME_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One recipe: its layout and the plan with their predictions, or why there is none."""

    row_id: str
    name: str
    model: str
    num_devices: int
    measured_s: float | None = None
    recipe: Layout | None = None
    plan: Layout | None = None
    inferences: tuple[str, ...] = ()
    problem: str = ""


def compare_published(row_ids: Sequence[str] | None = None) -> list[Compared]:
    """Price and plan every recipe, or those of the given rows."""
    rows = {row.row_id: row for table in TABLES for row in measured_rows(table)}
    found = []
    for row_id in row_ids or RECIPES:
        cells = rows[row_id].cells
        known: dict[str, Any] = {
            "row_id": row_id, "name": RECIPES.get(row_id, rows[row_id].source_id),
            "model": cells.text("model"), "num_devices": cells.count("gpus") or 0}
        try:
            case = make_case(cells)
            recipe = price_case(case)
            plan = search.search(case.graph, case.topology, recipe.request,
                                 time_limit_s=TIME_LIMIT_S)
            found.append(Compared(**known, measured_s=measured_seconds(cells), recipe=recipe,
                                  plan=plan, inferences=case.inferences))
        except (UnusableRow, MeshwrightError) as error:
            found.append(Compared(**known, problem=str(error)[:200]))
    return found


def memory_share(layout: Layout) -> float:
    """Of what the fullest device may use after the margin."""
    assert layout.prediction is not None
    return max(stage.total_memory_bytes / stage.capacity_bytes
               for stage in layout.prediction.stages)


def cells_of(compared: Compared) -> list[str]:
    """A row of the table."""
    recipe, plan = compared.recipe, compared.plan
    title = f"{compared.model}, {compared.num_devices:,}"
    if recipe is None or plan is None:
        return [compared.name, title, "-", "-", "-", "-", "-", f"none: {compared.problem}"]
    assert recipe.prediction is not None and plan.prediction is not None
    measured = compared.measured_s
    faster = recipe.prediction.step_s / plan.prediction.step_s
    return [compared.name, title, "-" if measured is None else f"{measured:.2f}",
            f"{recipe.prediction.step_s:.2f}", f"{plan.prediction.step_s:.2f}", f"{faster:.2f}",
            f"{memory_share(plan):.0%}",
            f"{degrees(recipe)} -> {degrees(plan)}: {what_changed(plan, recipe)}"]


HEADINGS = ("recipe", "model, devices", "measured s", "predicted s", "plan s", "faster",
            "memory", "recipe -> plan: what the recipe has more (+) or less (-), of the plan's "
            "step")


def markdown(compared: Sequence[Compared]) -> str:
    """The table for a README."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---|---|" + "---:|" * 5 + "---|"]
    lines += ["| " + " | ".join(cells_of(one)) + " |" for one in compared]
    return "\n".join(lines) + "\n"


def published(output: Path | None) -> int:
    """Print the table; with a folder, write it there too, with the layouts whole."""
    compared = compare_published()
    table = Table(title="Published recipes and the plan for the same run, predicted",
                  title_style="")
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold", justify="right" if heading in HEADINGS[2:7]
                         else "left")
    for one in compared:
        table.add_row(*cells_of(one))
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / "published.json", json.dumps([{
            "row_id": one.row_id, "name": one.name, "model": one.model,
            "num_devices": one.num_devices, "measured_s": one.measured_s,
            "inferences": list(one.inferences), "problem": one.problem,
            "recipe": None if one.recipe is None else to_data(one.recipe),
            "plan": None if one.plan is None else to_data(one.plan)}
            for one in compared], indent=1) + "\n")
        write_atomically(output / "published.md", markdown(compared))
    return 0
