"""A quick layout for one candidate: the filled ranks, made whole.

It seeds the search with a first answer, and is what there is when time runs out. The stages are
those of the filled relaxation (`planner/waterfill.py`) or the best cut; then every rank starts with
its fastest choices and pays the cheapest seconds per byte, whole layers at a time, until it fits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.layout import Choice
from planner.problem import StageProblem

__all__ = ["balanced_cut", "even_cut", "filled_cut", "greedy"]

Segments = list[list[tuple[int, int, Choice]]]
Counts = dict[tuple[int, int], list[int]]
"""(stage, run) -> layers with each option."""


def _fits(prefix: list[float], array: np.ndarray, limit: float, stages: int) -> list[int] | None:
    """Cut points of at most `stages` segments of weight <= limit, filled from the front."""
    cuts, start, last = [], 0, len(prefix) - 1
    for stage in range(stages):
        reach = int(array.searchsorted(prefix[start] + limit, side="right")) - 1
        end = min(reach, last - (stages - 1 - stage))  # leave a layer for each that follows
        if end <= start:
            return None
        cuts.append(end)
        start = end
    return cuts if start == last else None


def balanced_cut(weights: Sequence[float], stages: int) -> tuple[float, list[int]]:
    """Cut a chain into `stages` non-empty segments whose largest weight is least.

    Returns (a lower bound of that weight, tight to 2^-30 of the whole; the end of each segment).
    """
    array = np.concatenate([[0.0], np.cumsum(weights)])
    prefix: list[float] = array.tolist()
    low = max(prefix[-1] / stages, max(weights))
    high = prefix[-1] * (1 + 1e-12)
    best = _fits(prefix, array, low * (1 + 1e-12), stages)
    if best is not None:
        return low, best
    best = _fits(prefix, array, high, stages)
    while high - low > prefix[-1] * 2.0**-30:
        middle = (low + high) / 2
        cuts = _fits(prefix, array, middle, stages)
        if cuts is None:
            low = middle
        else:
            best, high = cuts, middle
    assert best is not None  # the whole chain fits the whole weight
    return low, best


def even_cut(problem: StageProblem, main: int) -> list[int]:
    """The end of each stage when all have equally many blocks of the main run."""
    first, stages = problem.runs[main].first, problem.num_stages
    each = problem.runs[main].count // stages
    return [first + each * (k + 1) for k in range(stages - 1)] + [problem.num_layers]


def filled_cut(problem: StageProblem, main: int, layers: Sequence[int]) -> list[int] | None:
    """The end of each stage when rank i has `layers[i]` of the main run; None if one is empty."""
    first, cuts, end = problem.runs[main].first, [], 0
    end = first
    for count in layers:
        end += count
        cuts.append(end)
    cuts[-1] = problem.num_layers
    return cuts if all(b > a for a, b in zip([0, *cuts], cuts, strict=False)) else None


def greedy(problem: StageProblem, cuts: Sequence[int]) -> Segments | None:
    """Choices for given stages, or None where a rank cannot be made to fit."""
    counts: Counts = {}
    start = 0
    for k, end in enumerate(cuts):
        for r, run in enumerate(problem.runs):
            here = min(end, run.first + run.count) - max(start, run.first)
            if here > 0:
                cls = problem.rank_class[k % problem.candidate.mesh.pp]
                options = problem.options[r]
                fastest = min(range(len(options)), key=lambda o: options[o].seconds(cls))
                counts[k, r] = [0] * len(options)
                counts[k, r][fastest] = here
        start = end
    for i in range(problem.candidate.mesh.pp):
        if not _fit_rank(problem, counts, i):
            return None
    return [[(r, n, problem.options[r][o].choice)
             for r in range(len(problem.runs)) if (k, r) in counts
             for o, n in enumerate(counts[k, r]) if n]
            for k in range(len(cuts))]


def _fit_rank(problem: StageProblem, counts: Counts, i: int) -> bool:
    """Move layers of rank i to smaller choices until it fits; each round buys the cheapest."""
    cls, p = problem.rank_class[i], problem.candidate.mesh.pp
    moment = problem.worst_moment(i)
    mine = [(k, r) for k, r in counts if k % p == i]
    ties = sum(costs[cls].static_bytes for runs, costs, _ in problem.ties
               if any(r in runs for _, r in mine))
    ends = {k: max(r for kk, r in mine if kk == k) for k, _ in mine}
    held = sum(moment[k // p] * max(problem.inside[i][r].held_bytes, problem.after[i][r].held_bytes)
               for k, r in ends.items() if k + 1 < problem.num_stages)
    room = problem.capacity_bytes[i] - ties - held

    # Per (stage, run): bytes, seconds and working set of a layer under each option.
    memories = {(k, r): [o.costs[cls].memory for o in problem.options[r]] for k, r in mine}
    sizes = {(k, r): [m.static_bytes + moment[k // p] * m.activation_bytes for m in row]
             for (k, r), row in memories.items()}
    seconds = {(k, r): [o.seconds(cls) for o in problem.options[r]] for k, r in mine}
    for _ in range(len(mine) * 12):
        used = working = 0
        for key in mine:
            for n, size, memory in zip(counts[key], sizes[key], memories[key], strict=True):
                if n:
                    used += n * size
                    working = max(working, memory.working_set_bytes)
        over = used + working - room
        if over <= 0:
            return True
        move = _cheapest_move(mine, counts, sizes, seconds)
        if move is None:
            return False
        key, source, target = move
        moved = min(counts[key][source], -(-over // (sizes[key][source] - sizes[key][target])))
        counts[key][source] -= moved
        counts[key][target] += moved
    return False


def _cheapest_move(mine: list[tuple[int, int]], counts: Counts,
                   sizes: dict[tuple[int, int], list[int]],
                   seconds: dict[tuple[int, int], list[float]]
                   ) -> tuple[tuple[int, int], int, int] | None:
    """((stage, run), option, smaller option) with the least seconds per byte saved."""
    best: tuple[float, tuple[tuple[int, int], int, int]] | None = None
    for key in mine:
        size, time = sizes[key], seconds[key]
        for source, n in enumerate(counts[key]):
            for target in range(len(size)) if n else ():
                if size[target] < size[source]:
                    price = (time[target] - time[source]) / (size[source] - size[target])
                    if best is None or price < best[0]:
                        best = price, (key, source, target)
    return best and best[1]
