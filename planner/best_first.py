"""The search: best-first over candidates by a valid lower bound, each solved as one program.

    rows (tp, pp, dp, micro-batch)   bounded together with numpy          planner/bounds.py
      -> meshes                      bounded where their groups lie       planner/bounds.py
      -> candidates                  bounded from their exact costs       planner/bounds.py
        -> filled                    bounded with memory                  planner/room.py,
                                                                          planner/waterfill.py
          -> solved                  cut and choices, one program each    planner/blocks.py, or for
                                     models of several unlike runs        planner/formulation.py

One heap holds all these nodes, ordered by bound. When the least bound reaches the best layout
found, nothing left can be faster: the answer is optimal over the whole space. What comes out of a
program is priced again by `planner/pricing.py`, and a disagreement is an error.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.block_forms import block_forms, variants
from planner.blocks import Blocks
from planner.bounds import SLACK, CandidateBounds, MeshBounds, row_bounds
from planner.costing import Candidate, Coster
from planner.greedy import balanced_cut, even_cut, filled_cut, greedy
from planner.layout import Choice, Mesh
from planner.pricing import Evaluation, evaluate
from planner.problem import StageProblem, make_problem
from planner.room import may_fit
from planner.space import Row, candidates, meshes, rows, space_size
from planner.waterfill import Waterfill
from profiler.errors import InternalError

__all__ = ["TOLERANCE", "Found", "Outcome", "Progress", "run_search"]

TOLERANCE = 1e-6
"""Two steps that differ by a smaller share are equal: far below any cost model's error, and above
the rounding of the program's integers."""

DETERMINISTIC_LIMIT = 20.0
"""CP-SAT's deterministic seconds for one candidate, after which its bound goes back into the heap;
twice as many the next time, so that every candidate is solved in the end."""

RUNNERS_UP = 8
RUNNERS_UP_TRIED = 60
"""How many other meshes are looked for after the proof, and in how many nodes at most."""

Segments = list[list[tuple[int, int, Choice]]]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search stands; times are seconds of a training step."""

    incumbent_s: float | None
    bound_s: float | None
    candidates: int
    solved: int
    message: str = ""


@dataclass(slots=True)
class Found:
    """A layout that fits: its candidate, stages and price."""

    candidate: Candidate
    segments: Segments
    evaluation: Evaluation

    @property
    def step_s(self) -> float:
        return self.evaluation.step_s


@dataclass(slots=True)
class Outcome:
    """What a search ends with. `found` is every priced layout that fits, best first."""

    found: list[Found] = field(default_factory=list)
    bound_s: float = inf
    complete: bool = False
    space_size: int = 0
    num_rows: int = 0
    num_candidates: int = 0
    num_filled: int = 0
    num_solved: int = 0

    @property
    def best(self) -> Found | None:
        return self.found[0] if self.found else None


@dataclass(frozen=True, slots=True)
class _Placed:
    """A row on one of its meshes, in the heap."""

    row: Row
    mesh: Mesh


@dataclass(frozen=True, slots=True)
class _Bounded:
    """A candidate in the heap, with the bound of its slowest rank."""

    candidate: Candidate
    slowest_s: float


@dataclass(frozen=True, slots=True)
class _Filled:
    """A candidate bounded with memory, and the stages to try.

    relaxed: the bound is that of the linear relaxation as well. limit: deterministic seconds.
    """

    problem: StageProblem
    slowest_s: float
    cuts: list[list[int]]
    relaxed: bool = False
    limit: float = DETERMINISTIC_LIMIT


class _Search:
    def __init__(self, coster: Coster, progress: Callable[[Progress], None] | None,
                 deadline: float | None) -> None:
        self.coster = coster
        self.progress = progress
        self.deadline = deadline
        self.bounds = CandidateBounds(coster)
        self.mesh_bounds = MeshBounds(coster)
        self.outcome = Outcome()
        self.heap: list[tuple[float, int, int, object]] = []
        self.beaten: list[tuple[float, int, int, object]] = []  # cannot be the best
        self.table: dict[str, NDArray[np.int64]] = {}
        self.rows: list[tuple[float, int]] = []  # (bound, index), the least last
        self.ticket = count()
        self.best_s = inf
        self.last_report = 0.0

    # A node is (bound, -depth, ticket, content): of equal bounds the deepest comes first, so that
    # an answer is found early; the ticket keeps the order the same from run to run.

    def push(self, bound_s: float, depth: int, content: object) -> None:
        node = (bound_s, -depth, next(self.ticket), content)
        heapq.heappush(self.heap if bound_s < self.best_s * (1 - TOLERANCE) else self.beaten, node)

    def beat(self, bound_s: float, depth: int, content: object) -> None:
        heapq.heappush(self.beaten, (bound_s, -depth, next(self.ticket), content))

    def feed(self, heap: list[tuple[float, int, int, object]]) -> None:
        """Move the rows that come before all else in a heap into it."""
        while self.rows and (not heap or self.rows[-1][0] < heap[0][0]):
            bound, index = self.rows.pop()
            row = Row(*(int(column[index]) for column in self.table.values()))
            heapq.heappush(heap, (bound, 0, next(self.ticket), row))

    def run(self) -> Outcome:
        self.table = rows(self.coster)
        bounds = row_bounds(self.coster, self.table)
        self.outcome.num_rows = len(bounds)
        self.outcome.space_size = space_size(self.coster, self.table)
        order = np.argsort(bounds, kind="stable")
        order = order[:np.count_nonzero(bounds < inf)][::-1]  # the least last, to be popped
        self.rows = list(zip(bounds[order].tolist(), order.tolist(), strict=True))
        try:
            self.feed(self.heap)
            while self.heap and self.heap[0][0] < self.best_s * (1 - TOLERANCE):
                if self.deadline is not None and time.monotonic() > self.deadline:
                    break
                bound, _, _, content = heapq.heappop(self.heap)
                self.step(bound, content)
                self.report(bound)
                self.feed(self.heap)
            else:
                self.outcome.complete = True
        except KeyboardInterrupt:
            if self.outcome.best is None:
                raise
        least = self.heap[0][0] if self.heap else inf
        self.outcome.bound_s = self.best_s if self.outcome.complete else min(least, self.best_s)
        if self.outcome.complete:
            with suppress(KeyboardInterrupt):
                self.runners_up()
        return self.outcome

    def runners_up(self) -> None:
        """Quick layouts of the meshes that came next, so that there is something to compare with.

        Their step times are those of layouts found, not proven best for their mesh.
        """
        for node in self.heap:
            heapq.heappush(self.beaten, node)
        tries = RUNNERS_UP_TRIED
        # Those that are bounded with memory already are likely the nearest.
        for runner in [n[3] for n in sorted(self.beaten) if isinstance(n[3], _Filled)]:
            if not tries or self.has_enough():
                break
            if runner.problem.candidate.mesh not in self.known_meshes():
                tries -= 1
                self.try_quickly(runner.problem, runner.cuts)
        for _ in range(tries):
            self.feed(self.beaten)
            known = self.known_meshes()
            if not self.beaten or self.has_enough():
                return
            _, _, _, content = heapq.heappop(self.beaten)
            if isinstance(content, Row):
                for mesh in meshes(self.coster, content):
                    bound = self.mesh_bounds.bound(content, mesh)
                    self.beat(bound, 1, _Placed(content, mesh))
            elif isinstance(content, _Placed):
                for candidate in candidates(self.coster, content.row, content.mesh):
                    least, slowest = self.bounds.bound(candidate)
                    self.beat(least, 2, _Bounded(candidate, slowest))
            elif (isinstance(content, _Bounded) and content.candidate.mesh not in known
                  and may_fit(self.coster, content.candidate)):
                problem = make_problem(self.coster, content.candidate)
                filled = Waterfill(problem)
                slowest_s, layers = filled.fill(content.slowest_s)
                if slowest_s < inf:
                    self.try_quickly(problem, self.cuts(problem, filled, layers))

    def known_meshes(self) -> set[Mesh]:
        return {found.candidate.mesh for found in self.outcome.found}

    def has_enough(self) -> bool:
        return len(self.known_meshes()) > RUNNERS_UP

    def try_quickly(self, problem: StageProblem, cuts: list[list[int]]) -> None:
        """A layout of a runner-up: its first stages; on one rank, soon done, the best choices."""
        found = len(self.outcome.found)
        self.try_cuts(problem, cuts[:1])
        if problem.candidate.mesh.pp == 1 and len(self.outcome.found) == found:
            self.solve_blocks(problem, must_beat=False)

    def step(self, bound: float, content: object) -> None:
        if isinstance(content, Row):
            for mesh in meshes(self.coster, content):
                self.push(max(bound, self.mesh_bounds.bound(content, mesh)), 1,
                          _Placed(content, mesh))
        elif isinstance(content, _Placed):
            for candidate in candidates(self.coster, content.row, content.mesh):
                self.outcome.num_candidates += 1
                exact, slowest = self.bounds.bound(candidate)
                self.push(max(exact, bound), 2, _Bounded(candidate, slowest))
        elif isinstance(content, _Bounded):
            self.fill(bound, content)
        elif isinstance(content, _Filled):
            self.solve(bound, content)

    def fill(self, bound: float, node: _Bounded) -> None:
        """Bound a candidate with memory, by filling its ranks."""
        self.outcome.num_filled += 1
        if not may_fit(self.coster, node.candidate):
            return
        problem = make_problem(self.coster, node.candidate)
        filled = Waterfill(problem)
        slowest_s, layers = filled.fill(node.slowest_s)
        if slowest_s == inf:
            return
        # Ranks of a better layout are each done within its step's share of a micro-batch.
        limit_s = self.best_s / problem.candidate.num_micro_batches
        total_s = filled.least_sum(limit_s) if limit_s < inf else 0.0
        with_memory = self.bounds.step(node.candidate, slowest_s * SLACK, total_s)
        self.push(max(bound, with_memory), 3,
                  _Filled(problem, slowest_s * SLACK, self.cuts(problem, filled, layers)))

    def cuts(self, problem: StageProblem, filled: Waterfill, layers: list[int]
             ) -> list[list[int]]:
        """Stages worth a try."""
        if problem.candidate.schedule.chunks > 1:
            return [even_cut(problem, filled.main)]
        cut = filled_cut(problem, filled.main, layers)
        weights = [min(o.seconds(0) for o in options)
                   for run, options in zip(problem.runs, problem.options, strict=True)
                   for _ in range(run.count)]
        balanced = balanced_cut(weights, problem.num_stages)[1]
        return [balanced] if cut is None or cut == balanced else [cut, balanced]

    def try_cuts(self, problem: StageProblem, cuts: list[list[int]]) -> None:
        """Keep the quick layouts of these stages that fit."""
        for cut in cuts:
            segments = greedy(problem, cut)
            if segments is not None:
                candidate = problem.candidate
                self.keep(candidate, segments, evaluate(self.coster, candidate, segments))

    def solve(self, bound: float, node: _Filled) -> None:
        """Try the quick layouts of a candidate, then its program."""
        problem = node.problem
        self.try_cuts(problem, node.cuts)
        if bound >= self.best_s * (1 - TOLERANCE):
            return  # as good as the bound: nothing left to solve
        if self.solve_blocks(problem, must_beat=True):
            self.outcome.num_solved += 1
        else:
            self.solve_program(bound, node)

    def solve_blocks(self, problem: StageProblem, *, must_beat: bool) -> bool:
        """Keep the best layouts of a model of one repeated block; False if it is of another kind.

        must_beat: only what is faster than the best so far is of use.
        """
        candidate, parts = problem.candidate, variants(problem)
        forms = [block_forms(part) for part in parts]
        if not all(forms):
            return False
        for part, spreads in zip(parts, forms, strict=True):
            filled = Waterfill(part)
            for form in spreads:
                limit_s = self.best_s if must_beat else inf
                answer = Blocks(part, form, filled).solve(limit_s, TOLERANCE)
                if isinstance(answer, tuple):
                    step_s, segments = answer
                    self.keep(candidate, segments, self.lifted(candidate, segments, step_s))
        return True

    def solve_program(self, bound: float, node: _Filled) -> None:
        """The general program: first its linear relaxation, which orders the heap, then whole."""
        from planner.formulation import relaxed_bound, solve

        problem, candidate = node.problem, node.problem.candidate
        if not node.relaxed:
            relaxed = relaxed_bound(problem, node.slowest_s) * (1 - TOLERANCE / 4)
            if relaxed < inf:
                self.push(max(bound, relaxed), 4,
                          _Filled(problem, node.slowest_s, [], relaxed=True))
            return
        self.outcome.num_solved += 1
        remaining = None if self.deadline is None else max(0.1, self.deadline - time.monotonic())
        solution = solve(problem, least_slowest_s=node.slowest_s,
                         deterministic_time=node.limit, time_limit_s=remaining,
                         most_s=self.best_s * (1 - TOLERANCE / 2))
        if solution.segments is not None:
            self.keep(candidate, solution.segments,
                      self.lifted(candidate, solution.segments, solution.objective_s))
        if solution.status in ("feasible", "unknown"):
            self.push(max(bound, solution.bound_s * (1 - TOLERANCE / 4)), 4,
                      _Filled(problem, node.slowest_s, [], relaxed=True, limit=2 * node.limit))

    def lifted(self, candidate: Candidate, segments: Segments, step_s: float) -> Evaluation:
        """The price of a program's answer, which must agree with the program."""
        evaluation = evaluate(self.coster, candidate, segments)
        if not evaluation.fits:
            raise InternalError(f"the program's answer does not fit: {candidate}, over by "
                                f"{evaluation.overflow_bytes()} bytes")
        if abs(evaluation.step_s - step_s) > TOLERANCE * evaluation.step_s:
            raise InternalError(f"program and price disagree: {step_s} s and "
                                f"{evaluation.step_s} s for {candidate}")
        return evaluation

    def keep(self, candidate: Candidate, segments: Segments, evaluation: Evaluation) -> None:
        if not evaluation.fits:
            return
        found = Found(candidate, segments, evaluation)
        self.outcome.found.append(found)
        self.outcome.found.sort(key=lambda f: f.step_s)
        del self.outcome.found[64:]
        self.best_s = self.outcome.found[0].step_s

    def report(self, bound: float) -> None:
        now = time.monotonic()
        if self.progress is not None and now - self.last_report > 0.05:
            self.last_report = now
            self.progress(Progress(
                incumbent_s=self.best_s if self.best_s < inf else None, bound_s=bound,
                candidates=self.outcome.num_candidates, solved=self.outcome.num_solved))


def run_search(coster: Coster, *, progress: Callable[[Progress], None] | None = None,
               time_limit_s: float | None = None) -> Outcome:
    """Search the whole space of a request."""
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    return _Search(coster, progress, deadline).run()
