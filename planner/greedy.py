"""A quick layout for one candidate: the filled ranks, made whole.

It seeds the search with a first answer, and is what there is when time runs out. The stages are
those of the filled relaxation (`planner/waterfill.py`) or the best cut; then every rank starts with
its fastest choices and pays the cheapest seconds per byte, whole layers at a time, until it fits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.layout import Choice
from planner.problem import Option, StageProblem

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

    def size(k: int, option: Option) -> int:
        memory = option.costs[cls].memory
        return memory.static_bytes + moment[k // p] * memory.activation_bytes

    for _ in range(len(mine) * 12):
        used = sum(n * size(k, problem.options[r][o])
                   for k, r in mine for o, n in enumerate(counts[k, r]) if n)
        working = max(problem.options[r][o].costs[cls].memory.working_set_bytes
                      for k, r in mine for o, n in enumerate(counts[k, r]) if n)
        over = used + working - room
        if over <= 0:
            return True
        best: tuple[float, int, int, int, int, int] | None = None
        for k, r in mine:
            options = problem.options[r]
            for o, n in enumerate(counts[k, r]):
                for other in range(len(options)) if n else ():
                    saved = size(k, options[o]) - size(k, options[other])
                    if saved <= 0:
                        continue
                    price = (options[other].seconds(cls) - options[o].seconds(cls)) / saved
                    if best is None or price < best[0]:
                        best = price, k, r, o, other, saved
        if best is None:
            return False
        _, k, r, o, other, saved = best
        moved = min(counts[k, r][o], -(-over // saved))
        counts[k, r][o] -= moved
        counts[k, r][other] += moved
    return False
