"""Price the rows of a table, as `plan check` prices a layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.published.adapter import Case, make_case
from benchmarks.published.table import Cells, MeasuredRow, UnusableRow
from planner.costing import Coster
from planner.layout import Layout
from planner.legality import violations
from planner.pricing import candidate_of, evaluate, price, segments_of
from profiler.errors import MeshwrightError

__all__ = ["Priced", "Refused", "measured_seconds", "price_case", "price_cells", "price_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A priced row: the layout with its prediction, and what was inferred about it."""

    row_id: str
    source_id: str
    cells: Cells
    layout: Layout
    measured_s: float | None
    inferences: tuple[str, ...]

    @property
    def predicted_s(self) -> float:
        assert self.layout.prediction is not None
        return self.layout.prediction.step_s

    @property
    def error(self) -> float:
        """Relative: above 0 where the prediction is too slow."""
        assert self.measured_s is not None
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A row that was not priced, and why."""

    row_id: str
    source_id: str
    reason: str


def measured_seconds(cells: Cells) -> float:
    """Seconds of a step: stated, or from the tokens per second.

    Raises:
        UnusableRow: neither is given.
    """
    seconds = cells.number("step_time_s")
    if seconds:
        return seconds
    rate = cells.number("tokens_s_gpu")
    batch, seq, gpus = cells.count("gbs"), cells.count("seq"), cells.count("gpus")
    if rate and batch and seq and gpus:
        return batch * seq / (rate * gpus)
    raise UnusableRow("no step time")


def price_case(case: Case) -> Layout:
    """The layout that a case means, with its prediction: of several the fastest that fits, or the
    nearest to fitting. All are of one request, so that one coster compares them."""
    if len(case.layouts) == 1:
        return price(case.graph, case.topology, case.layouts[0])
    coster = Coster(case.graph, case.topology, case.layouts[0].request)
    best: tuple[tuple[bool, float], Layout] | None = None
    for layout in case.layouts:
        if violations(coster, layout):
            continue
        result = evaluate(coster, candidate_of(layout), segments_of(coster, layout.stages))
        over = max(result.overflow_bytes())
        key = (over > 0, float(over) if over > 0 else result.step_s)
        if best is None or key < best[0]:
            best = key, layout
    return price(case.graph, case.topology, case.layouts[0] if best is None else best[1])


def price_cells(cells: Cells) -> tuple[Layout, tuple[str, ...]]:
    """The priced layout of a row, and the inferences.

    Raises:
        UnusableRow: it is refused; the message is the reason.
    """
    try:
        case = make_case(cells)
        return price_case(case), case.inferences
    except MeshwrightError as error:
        raise UnusableRow(_reason(error)) from None
    except (ValueError, OverflowError) as error:
        raise UnusableRow(f"no valid layout: {str(error)[:120]}") from None


def _reason(error: MeshwrightError) -> str:
    """The first problem, without its numbers, so that equal reasons count together."""
    text = str(error).splitlines()
    first = next((line.strip(" -") for line in text if line.strip() and not line.endswith(":")),
                 str(error))
    return first.split(";")[0][:120]


def price_rows(rows: Iterable[MeasuredRow]) -> tuple[list[Priced], list[Refused]]:
    """Every row with a step time, priced or refused."""
    priced: list[Priced] = []
    refused: list[Refused] = []
    for row in rows:
        try:
            if row.status != "ok":
                raise UnusableRow("the run failed: " + (row.status.split()[0] if row.status
                                                        else "no status"))
            seconds = measured_seconds(row.cells)
            layout, inferences = price_cells(row.cells)
        except UnusableRow as error:
            refused.append(Refused(row_id=row.row_id, source_id=row.source_id, reason=str(error)))
            continue
        priced.append(Priced(row_id=row.row_id, source_id=row.source_id, cells=row.cells,
                             layout=layout, measured_s=seconds, inferences=inferences))
    return priced, refused
