"""Filling ranks against every way to spread the layers, and what h_i must be like."""

from __future__ import annotations

from itertools import pairwise, product
from math import inf

import pytest

from planner.bounds import CandidateBounds
from planner.costing import Coster
from planner.problem import StageProblem, make_problem
from planner.waterfill import Waterfill
from tests.planner.brute_force import BruteForce
from tests.planner.instances import make_instance


def problems(seeds: range, each: int) -> list[tuple[Coster, StageProblem]]:
    """Some candidates of some instances, those with stages first."""
    result = []
    for seed in seeds:
        instance = make_instance(seed)
        coster = Coster(instance.graph, instance.topology, instance.request)
        found = sorted(BruteForce(coster).candidates(), key=lambda c: -c.mesh.pp)
        some = found[::max(1, len(found) // each)][:each]
        result += [(coster, make_problem(coster, candidate)) for candidate in some]
    return result


def spreads(filled: Waterfill) -> list[tuple[int, ...]]:
    """Every way to give the layers of the main run to ranks."""
    p, v = len(filled.ranks), filled.problem.candidate.schedule.chunks
    if v > 1:
        return [(filled.count // p,) * p]
    return [numbers for numbers in product(range(filled.count + 1), repeat=p)
            if sum(numbers) == filled.count]


@pytest.mark.parametrize("first", [4000, 4030])
def test_fill_is_the_best_spread(first: int) -> None:
    staged = full = 0
    for coster, problem in problems(range(first, first + 30), 6):
        filled = Waterfill(problem)
        _, least_slowest_s = CandidateBounds(coster).bound(problem.candidate)
        slowest, layers = filled.fill(least_slowest_s)
        # A rank that not even its forced layers fit is as if it were free of them.
        times = [[r.seconds(n) if n else (r.seconds(0) if r.seconds(0) < inf else 0.0)
                  for n in range(filled.count + 1)] for r in filled.ranks]
        best = min(max(times[i][n] if n else 0.0 for i, n in enumerate(numbers))
                   for numbers in spreads(filled))
        assert slowest == pytest.approx(max(best, least_slowest_s), rel=1e-9)
        if slowest < inf:
            assert sum(layers) == filled.count
        staged += len(filled.ranks) > 1
        full += slowest == inf
    assert staged > 30 and full > 3


@pytest.mark.parametrize("share", [1.0, 1.2, 2.0])
def test_least_sum_is_that_of_the_best_spread(share: float) -> None:
    for _, problem in problems(range(4060, 4080), 6):
        filled = Waterfill(problem)
        slowest, _ = filled.fill(0.0)
        if slowest == inf or any(rank.seconds(0) == inf for rank in filled.ranks):
            continue
        limit = slowest * share * (1 + 1e-12)
        sums = [sum(rank.seconds(n) for rank, n in zip(filled.ranks, numbers, strict=True))
                for numbers in spreads(filled)
                if all(n == 0 or rank.seconds(n) <= limit
                       for rank, n in zip(filled.ranks, numbers, strict=True))]
        assert filled.least_sum(limit) == pytest.approx(min(sums), rel=1e-9)


def test_seconds_are_convex_and_increasing() -> None:
    bends = 0
    for _, problem in problems(range(4080, 4120), 4):
        for rank in Waterfill(problem).ranks:
            seconds = [rank.seconds(n) for n in range(12)]
            finite = [s for s in seconds if s < inf]
            assert seconds == finite + [inf] * (12 - len(finite))  # once full, full
            steps = [b - a for a, b in pairwise(finite)]
            assert all(step >= -1e-15 for step in steps)
            assert all(b >= a - 1e-12 for a, b in pairwise(steps))
            bends += any(b > a * (1 + 1e-6) for a, b in pairwise(steps))
    assert bends > 5


def test_the_only_repeated_run_is_filled_whatever_else_is_heavy() -> None:
    checked = 0
    for _, problem in problems(range(4120, 4160), 3):
        repeated = [r for r, run in enumerate(problem.runs) if run.count > 1]
        if len(repeated) == 1:
            assert Waterfill(problem).main == repeated[0]
            checked += 1
    assert checked > 20
