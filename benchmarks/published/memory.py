"""Facts about memory against the planner's: verdicts, and peaks in the unit that a source used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.published.price import Refused, price_cells
from benchmarks.published.table import Cells, MeasuredRow, MemoryRow, UnusableRow
from planner.layout import Layout, StagePrediction

__all__ = ["MemoryResult", "joined", "memory_results", "peak_bytes", "verdict"]

UNITS = {"GiB": 2**30, "GB": 10**9, "MB": 10**6, "MiB": 2**20}
FROM_A_SHELL = "GB rounded"
RESERVED = 1.1
"""What the caching allocator reserves, over what it allocates: the median of the runs that publish
both (Dazz993/Mist, benchmark logs on L4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """One fact beside the prediction.

    published_fits: None where the source gives no verdict. fits: with the request's margin.
    published_peak_bytes, predicted_peak_bytes: of the rank and of the terms that the source's unit
        counts, where it gives a peak.
    over: of the largest stage's need over what the margin leaves, as a share of it.
    clear: it ran out of memory, and so did a run of the same table that can only need less: the
        same but for a smaller micro-batch or more recompute.
    """

    row_id: str
    source_id: str
    published_fits: bool | None
    fits: bool
    over: float
    published_peak_bytes: float | None
    predicted_peak_bytes: float | None
    unit: str
    clear: bool = False

    @property
    def peak_error(self) -> float | None:
        if not self.published_peak_bytes or self.predicted_peak_bytes is None:
            return None
        return self.predicted_peak_bytes / self.published_peak_bytes - 1


def joined(row: MemoryRow, measured: Mapping[str, MeasuredRow]) -> Cells:
    """The fact's cells, and those of the run it belongs to where the fact leaves them out."""
    run = measured.get(row.measured_row_id)
    if run is None:
        return row.cells
    return Cells(values=run.cells.values | {k: v for k, v in row.cells.values.items() if v})


def verdict(row: MemoryRow) -> bool | None:
    """Whether the run fitted; None where the fact does not say."""
    if row.verdict.startswith("fits"):
        return True
    if row.verdict.startswith(("oom", "does_not_fit")):
        return False
    return None


SAME = ("source_id", "model", "layers", "hidden", "gpu", "gpus", "gbs", "seq", "dp", "tp", "pp",
        "vpp", "cp", "sp", "dp_shard", "precision", "impl")
RECOMPUTES = ("none", "selective", "full")


def _clearly_out(rows: Iterable[MemoryRow]) -> frozenset[str]:
    """The rows that ran out of memory beside one that needs less and ran out too."""
    groups: dict[tuple[str, ...], list[tuple[float, int, str]]] = {}
    for row in rows:
        recompute, micro_batch = row.cells.text("recompute"), row.cells.text("mbs")
        if verdict(row) is False and recompute in RECOMPUTES and micro_batch.isdigit():
            key = tuple(row.cells.text(name) for name in SAME)
            groups.setdefault(key, []).append(
                (int(micro_batch), -RECOMPUTES.index(recompute), row.row_id))
    return frozenset(row_id for group in groups.values() for micro_batch, kept, row_id in group
                     if any(m <= micro_batch and k <= kept and (m, k) != (micro_batch, kept)
                            for m, k, _ in group))


def peak_bytes(layout: Layout, kind: str, devices_per_host: int | None) -> float:
    """Predicted bytes as the source counts them: allocated by the framework, reserved by it, or
    seen from outside; of the last rank where only that one reports, and of the first host where
    the source says a size seen from outside and not where (a shell is on that one)."""
    assert layout.prediction is not None
    stages = layout.prediction.stages
    if "last rank" in kind.lower():
        stages = stages[-1:]
    elif kind == FROM_A_SHELL and devices_per_host:
        stages = stages[:-(-devices_per_host * layout.mesh.pp // layout.mesh.num_devices)]
    return max(_counted(stage, kind) for stage in stages)


def _counted(stage: StagePrediction, kind: str) -> float:
    total = stage.total_memory_bytes
    if "nvidia-smi" in kind or "rounded" in kind:
        return total
    outside = sum(stage.memory_bytes.get(name, 0) for name in ("context", "communicators"))
    return (total - outside) * (RESERVED if "reserved" in kind.lower() else 1.0)


def memory_results(rows: Iterable[MemoryRow], measured: Iterable[MeasuredRow]
                   ) -> tuple[list[MemoryResult], list[Refused]]:
    """Every fact, compared or refused."""
    rows = tuple(rows)
    by_id, clear = {row.row_id: row for row in measured}, _clearly_out(rows)
    results: list[MemoryResult] = []
    refused: list[Refused] = []
    for row in rows:
        try:
            truth = verdict(row)
            if truth is None and row.cells.text("kind") != "peak_memory":
                raise UnusableRow("neither a verdict nor a peak")
            value = row.cells.number("value")
            unit = row.cells.text("unit")
            cells = joined(row, by_id)
            layout, _ = price_cells(cells)
        except UnusableRow as error:
            refused.append(Refused(row_id=row.row_id, source_id=row.source_id, reason=str(error)))
            continue
        assert layout.prediction is not None
        over = max(s.total_memory_bytes / s.capacity_bytes for s in layout.prediction.stages) - 1
        peak = value * UNITS[unit] if value and unit in UNITS and truth else None
        results.append(MemoryResult(
            row_id=row.row_id, source_id=row.source_id, published_fits=truth, fits=over <= 0,
            over=over, clear=row.row_id in clear, published_peak_bytes=peak, unit=unit,
            predicted_peak_bytes=None if peak is None else peak_bytes(
                layout, row.cells.text("value_kind"), cells.count("gpus_per_node"))))
    return results, refused
