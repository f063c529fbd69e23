"""The integer program of one candidate against brute force over its cuts and choices."""

from __future__ import annotations

import random
from math import inf

import pytest

from planner.best_first import TOLERANCE
from planner.bounds import CandidateBounds
from planner.costing import Candidate, Coster
from planner.formulation import Solution, relaxed_bound, solve
from planner.layout import Mesh, Schedule
from planner.pricing import evaluate
from planner.problem import make_problem
from tests.planner.brute_force import BruteForce
from tests.planner.instances import make_graph, make_instance, make_request, make_topology


def solved(coster: Coster, candidate: Candidate, **limits: float) -> Solution:
    problem = make_problem(coster, candidate)
    _, slowest = CandidateBounds(coster).bound(problem.candidate)
    return solve(problem, least_slowest_s=slowest, deterministic_time=20.0, **limits)


@pytest.mark.parametrize("chunk", range(4))
def test_program_equals_brute_force(chunk: int) -> None:
    fits = schedules = 0
    for seed in range(5000 + chunk * 12, 5012 + chunk * 12):
        instance = make_instance(seed)
        coster = Coster(instance.graph, instance.topology, instance.request)
        space = BruteForce(coster)
        everything = list(space.candidates())
        drawn = random.Random(seed).sample(everything, min(len(everything), 5))
        for candidate in drawn:
            least = space.sums.least_step(candidate)
            solution = solved(coster, candidate)
            assert solution.status == ("infeasible" if least == inf else "optimal"), seed
            if solution.segments is None:
                continue
            fits += 1
            schedules += candidate.schedule.name != "1f1b"
            priced = evaluate(coster, candidate, solution.segments)
            assert priced.fits
            assert priced.step_s == pytest.approx(least, rel=TOLERANCE), (seed, candidate)
            assert solution.objective_s == pytest.approx(least, rel=TOLERANCE)
            assert relaxed_bound(make_problem(coster, candidate), 0.0) <= least * (1 + TOLERANCE)
    assert fits > 10 and schedules > 3


def test_only_answers_that_are_wanted() -> None:
    rng = random.Random(3)
    graph = make_graph(rng, 4, num_kinds=2)
    coster = Coster(graph, make_topology(1, 2, 2**28), make_request(rng, global_batch=4))
    candidate = Candidate(mesh=Mesh(pp=2), micro_batch=1, num_micro_batches=4, schedule=Schedule())
    least = BruteForce(coster).sums.least_step(candidate)
    wanted = solved(coster, candidate, most_s=least * (1 + 1e-5))
    assert wanted.objective_s == pytest.approx(least, rel=TOLERANCE)
    assert solved(coster, candidate, most_s=least * (1 - 1e-5)).status == "infeasible"


def test_a_cut_behind_a_run_is_not_one_inside_it() -> None:
    """Inside the run little is sent, behind it the skip connection as well."""
    wrong = []
    for seed in range(60):
        rng = random.Random(seed)
        graph = make_graph(rng, 5, num_kinds=2, skips=True)
        if all(run.count == 1 for run in make_graph_runs(graph)):
            continue
        coster = Coster(graph, make_topology(2, 1, 2**28), make_request(rng, global_batch=2))
        candidate = Candidate(mesh=Mesh(pp=2), micro_batch=1, num_micro_batches=2,
                              schedule=Schedule())
        solution = solved(coster, candidate)
        least = BruteForce(coster).sums.least_step(candidate)
        if solution.objective_s != pytest.approx(least, rel=TOLERANCE):
            wrong.append(seed)
    assert not wrong


def make_graph_runs(graph):  # type: ignore[no-untyped-def]
    from planner.chain import make_chain

    return make_chain(graph).runs
