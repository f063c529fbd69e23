"""What the benchmark prints, and the JSON that it writes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.published.memory import MemoryResult
from benchmarks.published.price import Priced, Refused
from benchmarks.published.score import (
    Computed,
    Errors,
    MemoryScore,
    Sweep,
    by_source,
    computed_rows,
    errors_of,
    memory_scores,
    refusals,
    sweeps_of,
)
from benchmarks.published.worst import layout_text, print_computed, print_worst, worst_json
from planner.stacks import load_stack
from planner.stacks.record import fitted_constants

__all__ = ["Results", "make_results", "print_results", "to_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All that was found out."""

    priced: list[Priced]
    refused: list[Refused]
    memory: list[MemoryResult]
    memory_refused: list[Refused]
    errors: list[Errors]
    held_out: list[Errors]
    held_out_rows: list[Priced]
    sweeps: list[Sweep]
    computed: list[Computed]
    memory_scores: list[MemoryScore]


def is_fitted_on(row: Priced) -> bool:
    """Whether a constant of the row's stack was fitted on its model, on its kind of device."""
    assert row.layout.prediction is not None
    kernels = load_stack(row.layout.request.stack_name).kernels
    device = row.layout.prediction.stages[0].device
    return any(fit.kernels == kernels and device in fit.devices
               and row.cells.text("model") in fit.models for fit in fitted_constants().fits)


def make_results(priced: list[Priced], refused: list[Refused], memory: list[MemoryResult],
                 memory_refused: list[Refused]) -> Results:
    """Score what was priced."""
    held_out = [row for row in priced if not is_fitted_on(row)]

    def scored(rows: list[Priced]) -> list[Errors]:
        errors = [errors_of(source, group) for source, group in by_source(rows).items()]
        return [*errors, errors_of("overall", rows)] if rows else []

    return Results(priced=priced, refused=refused, memory=memory, memory_refused=memory_refused,
                   errors=scored(priced), held_out=scored(held_out), held_out_rows=held_out,
                   sweeps=sweeps_of(priced), computed=computed_rows(priced),
                   memory_scores=memory_scores(memory))


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}"


def _error_table(title: str, errors: Sequence[Errors]) -> Table:
    table = Table("source", "rows", "mean |e| %", "median |e| %", "bias %", "worst %", title=title)
    for row in errors:
        table.add_row(row.source, str(row.rows), _percent(row.mean), _percent(row.median),
                      f"{100 * row.bias:+.1f}", f"{100 * row.worst:+.1f}")
    return table


def print_results(results: Results, console: Console, worst: int = 10) -> None:
    """Tables by source and overall."""
    console.print(_error_table("Step time: every row priced", results.errors))
    console.print(_error_table("Step time: rows whose model no constant was fitted on",
                               results.held_out))
    _print_refusals(results.refused, console)
    print_computed(results.computed, console)
    if results.sweeps:
        _print_sweeps(results.sweeps, console)
    if results.memory_scores:
        _print_memory(results, console)
    print_worst(results.priced, results.held_out_rows, results.held_out, results.sweeps, console,
                worst)


def _print_refusals(refused: Sequence[Refused], console: Console) -> None:
    table = Table("source", "rows", "why", title=f"{len(refused)} rows refused")
    for source, reasons in refusals(refused).items():
        for reason, count in reasons.items():
            table.add_row(source, str(count), reason)
    console.print(table)


def _print_sweeps(sweeps: Sequence[Sweep], console: Console) -> None:
    table = Table("source", "sweep", "layouts", "Spearman", "regret %",
                  title="Sweeps: the order of layouts, and the regret of the first choice")
    for sweep in sweeps:
        table.add_row(sweep.source, sweep.name, str(sweep.layouts), f"{sweep.spearman:.3f}",
                      _percent(sweep.regret))
    table.add_row("median of all", "", str(len(sweeps)),
                  f"{statistics.median(s.spearman for s in sweeps):.3f}",
                  _percent(statistics.median(s.regret for s in sweeps)))
    table.add_row("worst of all", "", "", f"{min(s.spearman for s in sweeps):.3f}",
                  _percent(max(s.regret for s in sweeps)))
    console.print(table)


def _print_memory(results: Results, console: Console) -> None:
    table = Table("source", "fits: yes", "fits: no", "oom: fits", "oom: no",
                  "clear: fits", "peaks",
                  "median |e| %", "mean |e| %", "bias %",
                  title="Memory: published verdict and the planner's, with its default margin; "
                        "clear: ran out as did a run that needs less; peaks in the source's unit")
    for score in results.memory_scores:
        table.add_row(score.source, str(score.fits_fits), str(score.fits_oom), str(score.oom_fits),
                      str(score.oom_oom), f"{score.clear_fits} of {score.clear}",
                      str(score.peaks), _percent(score.peak_median),
                      _percent(score.peak_mean), _percent(score.peak_bias))
    console.print(table)
    _print_refusals(results.memory_refused, console)


def to_json(results: Results) -> dict[str, Any]:
    """Everything, row by row."""
    return {
        "errors": [asdict(e) for e in results.errors],
        "errors_held_out": [asdict(e) for e in results.held_out],
        "refused": refusals(results.refused),
        "sweeps": [asdict(s) for s in results.sweeps],
        "computed": [asdict(c) for c in results.computed],
        **worst_json(results.priced, results.held_out_rows, results.held_out, results.sweeps),
        "memory": [asdict(s) for s in results.memory_scores],
        "memory_refused": refusals(results.memory_refused),
        "rows": [{"row_id": row.row_id, "source_id": row.source_id,
                  "measured_s": row.measured_s, "predicted_s": row.predicted_s,
                  "error": row.error, "fitted_on": is_fitted_on(row),
                  "stack": row.layout.request.stack_name, "layout": layout_text(row),
                  "inferences": list(row.inferences),
                  "terms_s": row.layout.prediction.step_terms_s if row.layout.prediction else {}}
                 for row in results.priced],
        "refused_rows": [asdict(row) for row in results.refused],
        "memory_rows": [asdict(row) | {"peak_error": row.peak_error} for row in results.memory],
        "memory_refused_rows": [asdict(row) for row in results.memory_refused],
    }
