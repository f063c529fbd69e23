"""The rows and sweeps that miss most, each with its cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from benchmarks.published.causes import Cause, cause_of, known_causes, largest_terms
from benchmarks.published.price import Priced
from benchmarks.published.score import Computed, Errors, Sweep

__all__ = ["above_mark", "layout_text", "print_computed", "print_worst", "worst_json"]


SMALL = 0.05
"""Relative error below which a row asks for no cause."""


def layout_text(row: Priced) -> str:
    """A layout in a few words."""
    mesh = row.layout.mesh
    return (f"dp {mesh.dp} tp {mesh.tp} pp {mesh.pp} x{row.layout.schedule.chunks} "
            f"mb {row.layout.micro_batch}")


def above_mark(held_out: Iterable[Errors]) -> list[tuple[Errors, float]]:
    """The sources whose mean error is above their mark, with the mark."""
    marks = known_causes().marks
    return [(e, marks[e.source]) for e in held_out if e.mean > marks.get(e.source, float("inf"))]


def _worst(rows: Iterable[Priced], count: int) -> list[Priced]:
    return sorted(rows, key=lambda r: -abs(r.error))[:count]


def _regrets(sweeps: Iterable[Sweep], count: int) -> list[Sweep]:
    """The sweeps of greatest regret, those without any left out."""
    return sorted((s for s in sweeps if s.regret > 0), key=lambda s: -s.regret)[:count]


def print_worst(priced: Sequence[Priced], held_out_rows: Sequence[Priced],
                held_out: Iterable[Errors], sweeps: Iterable[Sweep], console: Console,
                count: int = 10) -> None:
    """The worst rows of all, those of each source above its mark, the worst regrets; then each
    cause that they have, once."""
    used: dict[str, Cause] = {}
    console.print(_rows_table(f"The {count} worst rows", _worst(priced, count), used))
    for errors, mark in above_mark(held_out):
        rows = [r for r in held_out_rows if r.source_id == errors.source]
        console.print(_rows_table(
            f"{errors.source}: mean {100 * errors.mean:.1f} %, above its mark of {100 * mark:g} %: "
            f"its {count} worst rows", _worst(rows, count), used))
    worst = _regrets(sweeps, count)
    if worst:
        console.print(_regret_table(worst, {r.row_id: r for r in priced}, used))
    for cause in used.values():
        console.print(f"{cause.name} ({cause.kind}): {cause.cause} Evidence: {cause.evidence}\n",
                      highlight=False, markup=False)


def _named(row: Priced, used: dict[str, Cause]) -> str:
    cause = cause_of(row, known_causes().causes)
    if cause is None:
        return "unknown" if abs(row.error) >= SMALL else "-"
    used[cause.name] = cause
    return cause.name


def _rows_table(title: str, rows: Iterable[Priced], used: dict[str, Cause]) -> Table:
    table = Table("row", "model", "layout", "measured s", "predicted s", "error %",
                  "largest terms", Column("cause", overflow="fold"), title=title)
    for row in rows:
        table.add_row(row.row_id, row.cells.text("model")[:24], layout_text(row),
                      f"{row.measured_s:.4g}", f"{row.predicted_s:.4g}", f"{100 * row.error:+.1f}",
                      largest_terms(row), _named(row, used))
    return table


def _regret_table(sweeps: Iterable[Sweep], rows: dict[str, Priced], used: dict[str, Cause]
                  ) -> Table:
    mark = known_causes().regret_mark
    table = Table("sweep", "regret %", "first choice", "error %",
                  Column("cause", overflow="fold"), "measured best", "error %",
                  Column("cause", overflow="fold"),
                  title=f"The worst regrets (mark: {100 * mark:g} %)")
    for sweep in sweeps:
        both = [rows[sweep.chosen], rows[sweep.best]]
        cells = [text for row in both
                 for text in (layout_text(row), f"{100 * row.error:+.1f}", _named(row, used))]
        table.add_row(sweep.name, f"{100 * sweep.regret:.1f}", *cells)
    return table


def print_computed(computed: Iterable[Computed], console: Console) -> None:
    """Sources whose rows follow from one another."""
    for found in computed:
        console.print(
            f"{found.source}: in {found.exact} of {found.sets} sets of rows that differ in nothing "
            "but the global batch, the seconds are linear in the micro-batches to a millionth: "
            "they are computed from one another, not measured row by row.\n", highlight=False)


def worst_json(priced: Sequence[Priced], held_out_rows: Sequence[Priced],
               held_out: Iterable[Errors], sweeps: Iterable[Sweep], count: int = 10
               ) -> dict[str, Any]:
    """The same as data."""
    rows = {r.row_id: r for r in priced}
    return {
        "worst_rows": [_row_json(r) for r in _worst(priced, count)],
        "above_mark": [{
            "source": errors.source, "mean": errors.mean, "mark": mark,
            "worst_rows": [_row_json(r) for r in _worst(
                (r for r in held_out_rows if r.source_id == errors.source), count)]}
            for errors, mark in above_mark(held_out)],
        "worst_regrets": [{
            "sweep": sweep.name, "source": sweep.source, "regret": sweep.regret,
            "chosen": _row_json(rows[sweep.chosen]), "best": _row_json(rows[sweep.best])}
            for sweep in _regrets(sweeps, count)],
    }


def _row_json(row: Priced) -> dict[str, Any]:
    cause = cause_of(row, known_causes().causes)
    return {"row_id": row.row_id, "model": row.cells.text("model"), "layout": layout_text(row),
            "measured_s": row.measured_s, "predicted_s": row.predicted_s, "error": row.error,
            "largest_terms": largest_terms(row), "cause": cause and {
                "name": cause.name, "kind": cause.kind, "cause": cause.cause,
                "evidence": cause.evidence}}
