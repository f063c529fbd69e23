"""Choose what a stack keeps of a logit and of a norm by what fitted and what ran out of memory.

    python -m benchmarks.published.fit_memory --table T.csv --memory M.csv

tries the values below on the rows of one model, and prints how many verdicts each has wrong there
and on the rows of every other model, the best first. A run that is said to fit and ran out counts
twice. The chosen values are written into `planner/stacks/*.json` by hand, with their source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import click

from benchmarks.published.adapter import Case, make_case
from benchmarks.published.memory import joined, verdict
from benchmarks.published.table import (
    MeasuredRow,
    MemoryRow,
    UnusableRow,
    measured_rows,
    memory_rows,
)
from planner.costing import Coster
from planner.layout import Layout
from planner.pricing import candidate_of, evaluate, segments_of
from planner.stacks import Stack, load_stack
from planner.stacks.lowering import lower
from profiler.errors import MeshwrightError

__all__ = ["Wrong", "wrong_verdicts"]

LOGIT_BYTES = (12, 16, 20, 24, 28)
STACKS = (("neox-flash1", "neox-flash2"), ("neox-flash2-rms",))
"""Stacks that are chosen for together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """Wrong verdicts: said_to_fit of those that ran out, said_not_to of those that fitted."""

    said_to_fit: int
    ran_out: int
    said_not_to: int
    fitted: int

    def __str__(self) -> str:
        return (f"{self.said_to_fit} of {self.ran_out} that ran out said to fit, "
                f"{self.said_not_to} of {self.fitted} that fitted said not to")


def fits(case: Case, layout: Layout, stack: Stack) -> bool:
    """Whether the planner says that a layout fits, under a stack as given."""
    coster = Coster(case.graph, case.topology, layout.request)
    coster.stack, coster.graph = stack, lower(case.graph, stack)
    return evaluate(coster, candidate_of(layout), segments_of(coster, layout.stages)).fits


def wrong_verdicts(cases: Iterable[tuple[Case, bool]], **changes: object) -> Wrong:
    """The verdicts that are wrong where the rows' stacks have these properties instead."""
    found = {(truth, said): 0 for truth in (True, False) for said in (True, False)}
    for case, truth in cases:
        layout = case.layouts[0]
        stack = replace(load_stack(layout.request.stack_name), **changes)  # type: ignore[arg-type]
        found[truth, fits(case, layout, stack)] += 1
    return Wrong(said_to_fit=found[False, True], ran_out=found[False, True] + found[False, False],
                 said_not_to=found[True, False], fitted=found[True, False] + found[True, True])


def cases_of(facts: Iterable[MemoryRow], runs: Iterable[MeasuredRow], stacks: Sequence[str]
             ) -> list[tuple[str, Case, bool]]:
    """(model, case, whether it fitted) of the rows of some stacks."""
    by_id, cases = {run.row_id: run for run in runs}, []
    for row in facts:
        truth = verdict(row)
        try:
            case = make_case(joined(row, by_id)) if truth is not None else None
        except (UnusableRow, MeshwrightError, ValueError):
            continue
        if case is not None and truth is not None and (
                case.layouts[0].request.stack_name in stacks):
            cases.append((row.cells.text("model"), case, truth))
    return cases


@click.command()
@click.option("--table", required=True, type=click.Path(path_type=Path))
@click.option("--memory", required=True, type=click.Path(path_type=Path))
@click.option("--model", default="LLAMA-13B", help="the model whose rows are chosen by")
def main(table: Path, memory: Path, model: str) -> None:
    """Print the wrong verdicts of every choice."""
    try:
        runs, facts = measured_rows(table), memory_rows(memory)
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    for stacks in STACKS:
        cases = cases_of(facts, runs, stacks)
        norms = (False, True) if "normalization" not in load_stack(stacks[0]).fused else (False,)
        tried = []
        for norm, logit in product(norms, LOGIT_BYTES):
            chosen, rest = (wrong_verdicts(
                [(case, truth) for name, case, truth in cases if (name == model) is same],
                float32_normalization=norm, logit_bytes=logit) for same in (True, False))
            tried.append((2 * chosen.said_to_fit + chosen.said_not_to, norm, logit, chosen, rest))
        for _, norm, logit, chosen, rest in sorted(tried, key=lambda t: t[0]):
            print(f"{', '.join(stacks)}: {logit} bytes a logit, norms "
                  f"{'in float32' if norm else 'as traced'}: {model}: {chosen}; others: {rest}")


if __name__ == "__main__":
    main()
