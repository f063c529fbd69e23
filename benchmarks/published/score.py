"""Statistics of predictions: errors by source, order within sweeps, memory verdicts and peaks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.published.memory import MemoryResult
from benchmarks.published.price import Priced, Refused

__all__ = ["Computed", "Errors", "MemoryScore", "Sweep", "by_source", "computed_rows", "errors_of",
           "memory_scores", "refusals", "spearman", "sweeps_of"]

LEAST_SWEEP = 10
"""Layouts of one model on the same devices and batch that make a sweep."""
LEAST_SETS = 3
OF_THE_BATCH = frozenset({"row_id", "gbs", "step_time_s", "tokens_s_gpu", "tflops_gpu", "mfu_pct",
                          "peak_mem", "source", "source_ref", "predicted_value"})
"""Columns that may differ between runs of one layout that take more or fewer micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of the step time of some rows, as shares (0.05 = 5 %)."""

    source: str
    rows: int
    mean: float
    median: float
    bias: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Layouts of one model on the same devices and batch.

    spearman: rank correlation of predicted and measured seconds. regret: how much slower the layout
        that is predicted fastest (`chosen`, a row) was measured than the measured `best`.
    """

    source: str
    name: str
    layouts: int
    spearman: float
    regret: float
    chosen: str
    best: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Of the sets of rows of a source that differ in nothing but the global batch, three of them or
    more: how many, and how many whose seconds are linear in it to a millionth. No clock is."""

    source: str
    sets: int
    exact: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryScore:
    """Verdicts and peaks of one source. fits_fits: published to fit and said to fit, and so on.
    clear, clear_fits: of those that ran out by a clear margin, all and said to fit."""

    source: str
    fits_fits: int
    fits_oom: int
    oom_fits: int
    oom_oom: int
    clear: int
    clear_fits: int
    peaks: int
    peak_median: float | None
    peak_mean: float | None
    peak_bias: float | None


def errors_of(source: str, rows: Sequence[Priced]) -> Errors:
    """The errors of some rows, one at least."""
    signed = [row.error for row in rows]
    absolute = [abs(e) for e in signed]
    return Errors(source=source, rows=len(rows), mean=statistics.fmean(absolute),
                  median=statistics.median(absolute), bias=statistics.fmean(signed),
                  worst=max(signed, key=abs))


def by_source(rows: Iterable[Priced]) -> dict[str, list[Priced]]:
    """The rows of each source, sources in order."""
    groups: dict[str, list[Priced]] = {}
    for row in rows:
        groups.setdefault(row.source_id, []).append(row)
    return dict(sorted(groups.items()))


def refusals(rows: Iterable[Refused]) -> dict[str, dict[str, int]]:
    """How often each reason refused a row, by source."""
    counts: dict[str, dict[str, int]] = {}
    for row in sorted(rows, key=lambda r: (r.source_id, r.reason)):
        reasons = counts.setdefault(row.source_id, {})
        reasons[row.reason] = reasons.get(row.reason, 0) + 1
    return counts


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for i in order[start:end + 1]:
            ranks[i] = (start + end) / 2
        start = end + 1
    return ranks


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; 0 where one of them is constant."""
    x, y = _ranks(a), _ranks(b)
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    covariance = sum((i - mean_x) * (j - mean_y) for i, j in zip(x, y, strict=True))
    scale = (sum((i - mean_x) ** 2 for i in x) * sum((j - mean_y) ** 2 for j in y)) ** 0.5
    return covariance / scale if scale else 0.0


def sweeps_of(rows: Iterable[Priced]) -> list[Sweep]:
    """Sweeps of ten or more layouts: one model, the same devices, batch, length and software."""
    groups: dict[tuple[str, ...], list[Priced]] = {}
    for row in rows:
        cells = row.cells
        key = (row.source_id, *(cells.text(c) for c in (
            "model", "layers", "hidden", "gpu", "gpus", "gbs", "seq", "precision")))
        groups.setdefault(key, []).append(row)
    sweeps = []
    for key, group in sorted(groups.items()):
        if len(group) < LEAST_SWEEP:
            continue
        predicted = [row.predicted_s for row in group]
        measured = [row.measured_s or 0.0 for row in group]
        chosen = min(range(len(group)), key=lambda i: predicted[i])
        best = min(range(len(group)), key=lambda i: measured[i])
        sweeps.append(Sweep(
            source=key[0], name=f"{key[1]} on {key[5]} {key[4]}, batch {key[6]} x {key[7]}",
            layouts=len(group), spearman=spearman(predicted, measured),
            regret=measured[chosen] / measured[best] - 1,
            chosen=group[chosen].row_id, best=group[best].row_id))
    return sweeps


def computed_rows(rows: Iterable[Priced]) -> list[Computed]:
    """The sources most of whose sets are exactly linear in the number of micro-batches."""
    sets: dict[tuple[str, ...], dict[int, float]] = {}
    for row in rows:
        same = sorted((name, text) for name, text in row.cells.values.items()
                      if name not in OF_THE_BATCH)
        key = row.source_id, *(f"{name}={text}" for name, text in same)
        sets.setdefault(key, {})[row.layout.num_micro_batches] = row.measured_s or 0.0
    counts: dict[str, list[bool]] = {}
    for key, seconds in sets.items():
        if len(seconds) >= 3:
            numbers = sorted(seconds)
            slopes = [(seconds[b] - seconds[a]) / (b - a)
                      for a, b in pairwise(numbers)]
            exact = max(slopes) - min(slopes) <= 1e-6 * abs(slopes[0])
            counts.setdefault(key[0], []).append(exact)
    return [Computed(source=source, sets=len(found), exact=sum(found))
            for source, found in sorted(counts.items())
            if len(found) >= LEAST_SETS and 2 * sum(found) > len(found)]


def memory_scores(results: Iterable[MemoryResult]) -> list[MemoryScore]:
    """Verdicts and peaks by source, and of all."""
    groups: dict[str, list[MemoryResult]] = {}
    for result in results:
        groups.setdefault(result.source_id, []).append(result)
        groups.setdefault("overall", []).append(result)
    scores = []
    for source in sorted(groups, key=lambda name: (name == "overall", name)):
        group = groups[source]
        count = {(fits, said): sum(r.published_fits is fits and r.fits is said for r in group)
                 for fits in (True, False) for said in (True, False)}
        peaks = [r.peak_error for r in group if r.peak_error is not None]
        scores.append(MemoryScore(
            source=source, fits_fits=count[True, True], fits_oom=count[True, False],
            oom_fits=count[False, True], oom_oom=count[False, False],
            clear=sum(r.clear for r in group), clear_fits=sum(r.clear and r.fits for r in group),
            peaks=len(peaks),
            peak_median=statistics.median(map(abs, peaks)) if peaks else None,
            peak_mean=statistics.fmean(map(abs, peaks)) if peaks else None,
            peak_bias=statistics.fmean(peaks) if peaks else None))
    return scores
