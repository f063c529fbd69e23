"""The search: best-first over candidates by a valid lower bound, each solved as one program.

    rows (tp, pp, dp, micro-batch)   bounded together with numpy          planner/bounds.py
      -> candidates                  bounded from their exact costs       planner/bounds.py
        -> relaxed                   bounded with memory, by the LP       planner/formulation.py
          -> solved                  the integer program                  planner/formulation.py

One heap holds all four kinds of node, ordered by bound. When the least bound reaches the best layout found,
nothing left can be faster: the answer is optimal over the whole space. What comes out of a program is
priced again by `planner/pricing.py`, and a disagreement is an error.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf

from planner.bounds import CandidateBounds, row_bounds
from planner.costing import Candidate, Coster
from planner.greedy import greedy
from planner.layout import Choice
from planner.pricing import Evaluation, evaluate
from planner.problem import StageProblem, make_problem
from planner.space import Row, expand, rows
from profiler.errors import InternalError

__all__ = ["TOLERANCE", "Found", "Outcome", "Progress", "run_search"]

TOLERANCE = 1e-6
"""Two steps that differ by a smaller share are equal: far below any cost model's error, and above the
rounding of the program's integers."""

DETERMINISTIC_LIMIT = 20.0
"""CP-SAT's deterministic seconds for one candidate, after which its bound goes back into the heap."""

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
    num_rows: int = 0
    num_candidates: int = 0
    num_relaxed: int = 0
    num_solved: int = 0

    @property
    def best(self) -> Found | None:
        return self.found[0] if self.found else None


class _Search:
    def __init__(self, coster: Coster, progress: Callable[[Progress], None] | None,
                 deadline: float | None) -> None:
        self.coster = coster
        self.progress = progress
        self.deadline = deadline
        self.bounds = CandidateBounds()
        self.outcome = Outcome()
        self.heap: list[tuple[float, int, int, object]] = []
        self.ticket = count()
        self.best_s = inf
        self.last_report = 0.0

    # A node is (bound, -depth, ticket, content): of equal bounds the deepest comes first, so that an
    # answer is found early; the ticket keeps the order the same from run to run.

    def push(self, bound_s: float, depth: int, content: object) -> None:
        if bound_s < self.best_s * (1 - TOLERANCE):
            heapq.heappush(self.heap, (bound_s, -depth, next(self.ticket), content))

    def run(self) -> Outcome:
        table = rows(self.coster)
        bounds = row_bounds(self.coster, table)
        self.outcome.num_rows = len(bounds)
        names = ("tp", "pp", "dp", "micro_batch", "num_micro_batches")
        columns = [table[name].tolist() for name in names]
        for index, bound in enumerate(bounds.tolist()):
            if bound < inf:
                self.push(bound, 0, Row(*(column[index] for column in columns)))
        try:
            while self.heap and self.heap[0][0] < self.best_s * (1 - TOLERANCE):
                if self.deadline is not None and time.monotonic() > self.deadline:
                    break
                bound, depth, _, content = heapq.heappop(self.heap)
                self.step(bound, -depth, content)
                self.report(bound)
            else:
                self.outcome.complete = True
        except KeyboardInterrupt:
            if self.outcome.best is None:
                raise
        least = self.heap[0][0] if self.heap else inf
        self.outcome.bound_s = self.best_s if self.outcome.complete else min(least, self.best_s)
        return self.outcome

    def step(self, bound: float, depth: int, content: object) -> None:
        if isinstance(content, Row):
            for candidate in expand(self.coster, content):
                self.outcome.num_candidates += 1
                problem = make_problem(self.coster, candidate)
                exact, slowest = self.bounds.bound(problem)
                self.push(max(exact, bound), 1, (problem, slowest))
            return
        problem, slowest = content  # type: ignore[misc]
        if depth == 1:
            self.relax(bound, problem, slowest)
        else:
            self.solve(bound, problem, slowest)

    def relax(self, bound: float, problem: StageProblem, slowest: float) -> None:
        """Seed with the greedy answer; bound with memory."""
        from planner.formulation import relaxed_bound

        seeded = greedy(self.coster, problem)
        if seeded is not None:
            self.keep(problem.candidate, seeded[1], seeded[0])
            if seeded[0].step_s * (1 - TOLERANCE) <= bound:
                return  # as good as the bound: nothing left to solve
        self.outcome.num_relaxed += 1
        relaxed = relaxed_bound(problem, slowest)
        if relaxed < inf:
            self.push(max(bound, relaxed * (1 - 1e-7)), 2, (problem, slowest))

    def solve(self, bound: float, problem: StageProblem, slowest: float) -> None:
        from planner.formulation import solve

        self.outcome.num_solved += 1
        remaining = None if self.deadline is None else max(0.1, self.deadline - time.monotonic())
        solution = solve(problem, least_slowest_s=slowest, deterministic_time=DETERMINISTIC_LIMIT,
                         most_s=self.best_s * (1 - TOLERANCE / 2), time_limit_s=remaining)
        if solution.segments is not None:
            evaluation = evaluate(self.coster, problem.candidate, solution.segments)
            if not evaluation.fits:
                raise InternalError(f"the program's answer does not fit: {problem.candidate}, "
                                    f"over by {evaluation.overflow_bytes()} bytes")
            if solution.status == "optimal" and evaluation.step_s < solution.bound_s * (
                    1 - TOLERANCE):
                raise InternalError(
                    f"program and price disagree: {solution.bound_s} s and {evaluation.step_s} s "
                    f"for {problem.candidate}")
            self.keep(problem.candidate, solution.segments, evaluation)
        if solution.status in ("feasible", "unknown"):
            raise_to = max(bound, solution.bound_s * (1 - 1e-7))
            self.push(raise_to, 2, (problem, slowest))

    def keep(self, candidate: Candidate, segments: Segments, evaluation: Evaluation) -> None:
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
