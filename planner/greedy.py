"""A quick layout for one candidate: balanced stages under a few uniform policies.

It seeds the search with a first answer and is what there is when time runs out. Each policy is one choice
for every layer that allows it; stages are cut so that the slowest is as fast as can be; then each
rank takes faster choices as far as its memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.costing import Coster
from planner.layout import Choice
from planner.pricing import Evaluation, evaluate
from planner.problem import Option, StageProblem

__all__ = ["balanced_cut", "greedy", "least_bottleneck"]

Segments = list[list[tuple[int, int, Choice]]]


def _fits(prefix: np.ndarray, limit: float, stages: int) -> list[int] | None:
    """Cut points of at most `stages` segments of weight <= limit, filled from the front."""
    cuts, start, last = [], 0, len(prefix) - 1
    for stage in range(stages):
        reach = int(np.searchsorted(prefix, prefix[start] + limit, side="right")) - 1
        end = min(reach, last - (stages - 1 - stage))  # leave a layer for each that follows
        if end <= start:
            return None
        cuts.append(end)
        start = end
    return cuts if start == last else None


def balanced_cut(weights: Sequence[float], stages: int) -> tuple[float, list[int]]:
    """Cut a chain into `stages` non-empty segments whose largest weight is least.

    Returns (that weight, end of each segment); exact to 2^-40 of the whole.
    """
    prefix = np.concatenate([[0.0], np.cumsum(weights)])
    low = max(float(prefix[-1]) / stages, max(weights))
    high = float(prefix[-1])
    tolerance = high * 2.0**-40
    best = _fits(prefix, low + tolerance, stages)
    if best is not None:
        return low, best
    best = _fits(prefix, high + tolerance, stages)
    assert best is not None, (len(weights), stages)
    while high - low > tolerance:
        middle = (low + high) / 2
        cuts = _fits(prefix, middle, stages)
        if cuts is None:
            low = middle
        else:
            best, high = cuts, middle
    return low, best


def least_bottleneck(weights: Sequence[float], stages: int) -> float:
    """Lower bound of the largest segment weight."""
    return balanced_cut(weights, stages)[0]


def _stages(problem: StageProblem, cuts: list[int], chosen: Sequence[Option]) -> Segments:
    stages: Segments = []
    start = 0
    for end in cuts:
        stage = []
        for r, run in enumerate(problem.runs):
            count = min(end, run.first + run.count) - max(start, run.first)
            if count > 0:
                stage.append((r, count, chosen[r].choice))
        stages.append(stage)
        start = end
    return stages


def _policies(problem: StageProblem) -> list[list[Option]]:
    """One option per run for each distinct choice that occurs, nearest where it is not offered."""
    policies = []
    choices = dict.fromkeys(o.choice for options in problem.options for o in options)
    for choice in choices:
        def distance(option: Option, choice: Choice = choice) -> tuple[bool, bool, bool]:
            mine = option.choice
            return (mine.tensor_parallel != choice.tensor_parallel,
                    mine.recompute != choice.recompute, mine.reshard != choice.reshard)
        policies.append([min(options, key=distance) for options in problem.options])
    return policies


def greedy(coster: Coster, problem: StageProblem) -> tuple[Evaluation, Segments] | None:
    """The best of the policies that fits, or None."""
    best: tuple[Evaluation, Segments] | None = None
    for chosen in _policies(problem):
        weights = [chosen[r].seconds(problem.rank_class[0])
                   for r, run in enumerate(problem.runs) for _ in range(run.count)]
        _, cuts = balanced_cut(weights, problem.num_stages)
        stages = _stages(problem, cuts, chosen)
        result = evaluate(coster, problem.candidate, stages)
        if not result.fits:
            continue
        if best is None or result.step_s < best[0].step_s:
            best = result, stages
    return best and _quicken(coster, problem, *best)


def _quicken(coster: Coster, problem: StageProblem, result: Evaluation, stages: Segments
             ) -> tuple[Evaluation, Segments]:
    """Give every stage in turn the fastest choices that still fit."""
    candidate = problem.candidate
    for k in range(len(stages)):
        for position in range(len(stages[k])):
            r, count, _ = stages[k][position]
            cls = problem.rank_class[k % candidate.mesh.pp]
            for option in sorted(problem.options[r], key=lambda o: o.seconds(cls))[:3]:
                trial = [list(stage) for stage in stages]
                trial[k][position] = (r, count, option.choice)
                outcome = evaluate(coster, candidate, trial)
                if outcome.fits and outcome.step_s < result.step_s:
                    result, stages = outcome, trial
                    break
    return result, stages
