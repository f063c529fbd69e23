"""The stage table and the memory of each stage: a row is a pipeline rank, all of its chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table

from planner.layout import Choice, Layout, Mesh, StagePrediction
from planner.report.tables import figures
from planner.report.words import LayerNames, gib, printable, ranges, seconds, term
from profiler.layer_graph import LayerGraph

__all__ = ["memory_tables", "stage_table"]

MANY_STAGES = 16
"""Above this, neighbouring pipeline ranks with equal work are one row."""

MEMORY_COLUMNS = 6
MEMORY_COLUMNS_IN_ALL = 18
"""How many unlike stages are shown in full: beyond, the first, the fullest and the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One pipeline rank: its layers by choice, in the order of the first of each."""

    index: int
    layers: tuple[tuple[Choice, tuple[int, ...]], ...]
    prediction: StagePrediction

    @property
    def seconds(self) -> float:
        return sum(self.prediction.micro_batch_s.values())


def _ranks(layout: Layout) -> list[_Rank]:
    result = []
    for prediction in layout.prediction.stages if layout.prediction else ():
        by_choice: dict[Choice, list[int]] = {}
        for stage in layout.stages[prediction.pipeline_rank::layout.mesh.pp]:
            for layer, choice in stage.iter_layers():
                by_choice.setdefault(choice, []).append(layer)
        layers = tuple((choice, tuple(found)) for choice, found in by_choice.items())
        result.append(_Rank(index=prediction.pipeline_rank, layers=layers, prediction=prediction))
    return result


def _collapse(ranks: Sequence[_Rank], graph: LayerGraph) -> list[list[_Rank]]:
    """Neighbours that do equal work, together; each alone where there are few."""
    if len(ranks) <= MANY_STAGES:
        return [[rank] for rank in ranks]

    def work(rank: _Rank) -> object:
        layers = tuple((choice, tuple(graph.layers[i].kind for i in found))
                       for choice, found in rank.layers)
        return layers, f"{rank.seconds:.6g}", rank.prediction.device

    return [list(run) for _, run in groupby(ranks, key=work)]


def stage_table(layout: Layout, graph: LayerGraph) -> Table:
    """Layers, ranks, choices and seconds of each pipeline rank; idle columns are left out."""
    mesh, names = layout.mesh, LayerNames(graph)
    runs = _collapse(_ranks(layout), graph)
    mixed = len({run[0].prediction.device for run in runs}) > 1
    optional = {"device": mixed, "reshard": mesh.dp_shard > 1, "tp": mesh.tp > 1}
    columns = [name for name in ("stage", "layers", "ranks", "device", "recompute", "reshard", "tp",
                                 "micro-batch", "GiB") if optional.get(name, True)]
    table = figures(*columns, right=("stage", "micro-batch", "GiB"),
                    unbroken=("ranks", "micro-batch", "GiB"))
    for run in runs:
        for cells in _rows(run, mesh, names):
            table.add_row(*(cells.get(name, "") for name in columns))
    return table


def _rows(run: Sequence[_Rank], mesh: Mesh, names: LayerNames) -> Iterator[dict[str, str]]:
    """A row for each choice of a pipeline rank; several ranks together are one row."""
    first = run[0]
    most = gib(max(rank.prediction.total_memory_bytes for rank in run))
    whole = {"stage": ranges(rank.index for rank in run), "ranks": _devices(run, mesh),
             "device": printable(first.prediction.device), "micro-batch": seconds(first.seconds),
             "GiB": most if len(run) == 1 else f"<= {most}"}
    if len(run) > 1:
        every = sorted(layer for rank in run for _, layers in rank.layers for layer in layers)
        text = f"{names.text(every)} ({len(every) // len(run)} each)"
        yield whole | {"layers": text} | _choices(first.layers)
        return
    for position, (choice, layers) in enumerate(first.layers):
        cells = {"layers": names.text(layers)} | _choices([(choice, layers)])
        yield (whole if position == 0 else {}) | cells


def _choices(layers: Sequence[tuple[Choice, Sequence[int]]]) -> dict[str, str]:
    """What is chosen, with the number of layers where they differ: `full 2, none 4`."""
    def words(word: Callable[[Choice], str]) -> str:
        counts: Counter[str] = Counter()
        for choice, found in layers:
            counts[word(choice)] += len(found)
        if len(counts) == 1:
            return next(iter(counts))
        return ", ".join(f"{name} {count}" for name, count in counts.items())

    return {"recompute": words(lambda choice: choice.recompute),
            "reshard": words(lambda choice: "yes" if choice.reshard else "no"),
            "tp": words(lambda choice: "yes" if choice.tensor_parallel else "no")}


def _devices(run: Sequence[_Rank], mesh: Mesh) -> str:
    """Their ranks in the mesh: `0-7`, or `0-7 of every 32` where they come back."""
    stride = mesh.stride("pp") if mesh.pp > 1 else mesh.num_devices
    low, high = run[0].index * stride, (run[-1].index + 1) * stride - 1
    block = f"{low:,}-{high:,}" if high > low else f"{low:,}"
    period = mesh.pp * stride
    return block if period == mesh.num_devices else f"{block} of every {period:,}"


def memory_tables(layout: Layout) -> Iterator[Table]:
    """Terms as rows, unlike stages as columns, a few columns at a time."""
    unlike: dict[object, list[StagePrediction]] = {}
    for stage in layout.prediction.stages if layout.prediction else ():
        key = (tuple(stage.memory_bytes.items()), stage.capacity_bytes)
        unlike.setdefault(key, []).append(stage)
    columns = _choose(list(unlike.values()))
    for start in range(0, len(columns), MEMORY_COLUMNS):
        yield _memory_table(layout, columns[start:start + MEMORY_COLUMNS])


def _choose(columns: list[list[StagePrediction]]) -> list[list[StagePrediction]]:
    if len(columns) <= MEMORY_COLUMNS_IN_ALL:
        return columns
    fullest = max(columns, key=lambda c: c[0].total_memory_bytes / c[0].capacity_bytes)
    keep = [*columns[:3], fullest, *columns[-2:]]
    return [column for column in columns if column in keep]


def _memory_table(layout: Layout, columns: Sequence[list[StagePrediction]]) -> Table:
    single = layout.prediction is not None and len(layout.prediction.stages) == 1
    names = ["GiB"] if single else [
        f"stage{'s' if len(column) > 1 else ''} {ranges(stage.pipeline_rank for stage in column)}"
        for column in columns]
    table = figures("term", *names, right=names)
    stages = [column[0] for column in columns]
    for name in dict.fromkeys(name for stage in stages for name in stage.memory_bytes):
        values = (stage.memory_bytes.get(name) for stage in stages)
        table.add_row(printable(term(name)), *(gib(value) if value else "-" for value in values))
    table.add_section()
    table.add_row("needed", *(gib(stage.total_memory_bytes) for stage in stages))
    margin = layout.request.memory_margin
    table.add_row(f"usable ({margin:.0%} left free)" if margin else "usable",
                  *(gib(stage.capacity_bytes) for stage in stages))
    spare = [stage.capacity_bytes - stage.total_memory_bytes for stage in stages]
    table.add_row("to spare", *(gib(value) for value in spare))
    return table
