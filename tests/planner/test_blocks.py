"""Models of one repeated block: which cuts the forms stand for, and their best against brute force.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from math import comb, inf

import pytest

from planner.best_first import TOLERANCE
from planner.block_forms import MOST_VARIANTS, BlockForm, block_forms, variants
from planner.blocks import Blocks
from planner.costing import Candidate, Coster
from planner.layout import Mesh, Schedule
from planner.pricing import evaluate
from planner.problem import StageProblem, make_problem
from planner.waterfill import Waterfill
from tests.planner.brute_force import BruteForce
from tests.planner.instances import (
    make_blocks,
    make_graph,
    make_instance,
    make_request,
    make_topology,
)


def best_of(coster: Coster, problem: StageProblem) -> float | None:
    """The least step over all variants and forms; None if the problem is not of this kind."""
    parts = [(part, block_forms(part)) for part in variants(problem)]
    if not all(forms for _, forms in parts):
        return None
    best = inf
    for part, forms in parts:
        filled = Waterfill(part)
        for form in forms:
            answer = Blocks(part, form, filled).solve(best, TOLERANCE / 10)
            if isinstance(answer, tuple):
                step_s, segments = answer
                priced = evaluate(coster, problem.candidate, segments)
                assert priced.fits
                assert priced.step_s == pytest.approx(step_s, rel=TOLERANCE)
                best = min(best, step_s)
    return best


@pytest.mark.parametrize("chunk", range(4))
def test_blocks_equal_brute_force(chunk: int) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(6000 + chunk * 30, 6030 + chunk * 30):
        instance = make_instance(seed)
        coster = Coster(instance.graph, instance.topology, instance.request)
        space = BruteForce(coster)
        if space.blocks is None:
            continue
        drawn = list(space.candidates())
        random.Random(seed).shuffle(drawn)
        drawn.sort(key=lambda c: c.mesh.pp == 1 or c.schedule.name == "gpipe")
        for candidate in drawn[:5] + drawn[-3:]:
            best = best_of(coster, make_problem(coster, candidate))
            if best is None:
                kinds["other"] += 1
                continue
            least = space.sums.least_step(candidate)
            assert best == pytest.approx(least, rel=TOLERANCE), (seed, candidate)
            kinds["none" if best == inf else candidate.schedule.name
                  if candidate.mesh.pp > 1 else "one rank"] += 1
    assert kinds["one rank"] > 5 and kinds["1f1b"] + kinds["interleaved"] > 5, kinds


def problem_of(before: int, blocks: int, after: int, pp: int, *, num_micro_batches: int = 8
               ) -> StageProblem:
    rng = random.Random(1)
    graph = make_blocks(rng, before, blocks, after)
    coster = Coster(graph, make_topology(1, pp, 2**30),
                    make_request(rng, global_batch=num_micro_batches))
    return make_problem(coster, Candidate(
        mesh=Mesh(pp=pp), micro_batch=1, num_micro_batches=num_micro_batches,
        schedule=Schedule()))


def cuts_of(problem: StageProblem, form: BlockForm) -> list[tuple[int, ...]]:
    """The ends of all stages but the last, for every number of blocks that ranks can have."""
    blocks, p = problem.runs[form.main].count, problem.candidate.mesh.pp
    choices = [range(0 if form.before[i] or form.after[i] else 1, blocks + 1)
               if form.blocks[i] else range(1) for i in range(p)]
    cuts = []
    for numbers in product(*choices):
        if sum(numbers) == blocks:
            ends, end = [], 0
            for i, n in enumerate(numbers):
                end += len(form.before[i]) + n + len(form.after[i])
                ends.append(end)
            assert ends.pop() == problem.num_layers
            cuts.append(tuple(ends))
    return cuts


@pytest.mark.parametrize(("before", "blocks", "after", "pp"), [
    (1, 4, 1, 3), (2, 3, 0, 2), (1, 3, 3, 4), (3, 2, 2, 5), (2, 2, 2, 6), (1, 2, 0, 3)])
def test_the_forms_are_all_cuts_and_each_once(before: int, blocks: int, after: int, pp: int
                                              ) -> None:
    problem = problem_of(before, blocks, after, pp)
    assert max(run.count for run in problem.runs) == blocks
    forms = block_forms(problem)
    cuts = Counter(cut for form in forms for cut in cuts_of(problem, form))
    assert set(cuts) == set(combinations(range(1, problem.num_layers), pp - 1))
    assert set(cuts.values()) == {1}


def test_interleaved_stages_have_one_form() -> None:
    problem = problem_of(2, 8, 2, 2)
    problem = replace(problem, candidate=replace(
        problem.candidate, schedule=Schedule(name="interleaved", chunks=2)))
    [form] = block_forms(problem)
    assert (form.before, form.after) == (((0, 1), ()), ((), (3, 4)))


def test_what_is_not_of_this_kind_has_no_form() -> None:
    problem = problem_of(1, 4, 1, 3)
    assert block_forms(problem)
    gpipe = replace(problem.candidate, schedule=Schedule(name="gpipe"))
    assert not block_forms(replace(problem, candidate=gpipe))
    rng = random.Random(0)
    unlike = make_graph(rng, 6, num_kinds=3, even_edges=True)
    coster = Coster(unlike, make_topology(1, 2, 2**30), make_request(rng, global_batch=8))
    repeated = [run for run in coster.chain.runs if run.count > 1]
    assert len(repeated) > 1
    assert not block_forms(make_problem(coster, Candidate(
        mesh=Mesh(pp=2), micro_batch=1, num_micro_batches=8, schedule=Schedule())))


def test_many_layers_around_the_blocks_are_too_many_forms() -> None:
    assert not block_forms(problem_of(9, 2, 0, 8))
    assert len(block_forms(problem_of(6, 2, 0, 8))) == 2**5


def test_variants_fix_layers_and_never_blocks() -> None:
    seen = Counter[int]()
    for seed in range(40):
        rng = random.Random(seed)
        graph = make_blocks(rng, 2, 3, 1)
        coster = Coster(graph, make_topology(1, 4, 2**30), make_request(rng, global_batch=4))
        problem = make_problem(coster, Candidate(mesh=Mesh(pp=2, tp=2), micro_batch=1,
                                                 num_micro_batches=4, schedule=Schedule()))
        parts = variants(problem)
        seen[len(parts)] += 1
        for r, options in enumerate(problem.options):
            assert {o.choice for part in parts for o in part.options[r]} == {
                o.choice for o in options}
            if problem.runs[r].count > 1:
                assert all(part.options[r] == options for part in parts)
    assert len(seen) > 1


def test_many_unlike_layers_do_not_make_thousands_of_variants() -> None:
    rng = random.Random(2)
    graph = make_blocks(rng, 20, 2, 20)
    coster = Coster(graph, make_topology(1, 4, 2**32), make_request(rng, global_batch=4))
    problem = make_problem(coster, Candidate(mesh=Mesh(pp=2, tp=2), micro_batch=1,
                                             num_micro_batches=4, schedule=Schedule()))
    assert comb(40, 2) > MOST_VARIANTS
    assert len(variants(problem)) <= MOST_VARIANTS
