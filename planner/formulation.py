"""The integer program: cut a chain of runs into stages and choose per-layer options.

Sets
    k in 0..K-1      stages, K = p*v; stage k runs on pipeline rank k mod p
    r in runs        neighbouring equal layers, n_r of them; o in O_r its options
    i in 0..p-1      pipeline ranks; g tied parameters with their runs R_g

Parameters (times in units of `unit_s`, memory in blocks of 512 bytes)
    f, b[r,o,i]      forward, backward time of a layer; h[r,o,i] its once-a-step time
    a, q, w[r,o,i]   its activations, static bytes, working set
    c[r], e[r]       receiving times of a cut inside / after run r
    M_i, N_i         memory of a rank; moments of its schedule (micro-batches in flight per chunk)

Variables
    y[k,r]           layers of run r in stages 0..k               x[k,r,o]  of stage k with option o
    S[k,r], F[k,r]   run r is started / finished by stage k       u[i,r,o]  rank i uses option o
    T (or TF, TB)    slowest rank        A  longest tail          W[i]      working set of rank i
    z[g,i]           rank i holds tied parameter g

Objective: minimise (m - 1/v) T + (1/v) sum_i t_i + A + ties + rest         (planner/pricing.py)

Constraints, each by its function
    (1) _order        runs follow one another; every stage has a layer; the stages of an
                      interleaved schedule have equally many blocks
    (2) _counts       options of a run's layers in a stage add up to its layers there
    (3) _ties         a tied parameter is held wherever a layer of it lies
    (4) _times        T is at least the time of each rank, sends included
    (5) _tails        A is at least what follows the last backward on each rank
    (6) _memory       at each moment of the schedule, and in the optimizer step, each rank fits

Moments of interleaved schedules are many and few of them bind: they are added where an answer
violates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from planner.cost.layer import LayerCost
from planner.cost.memory import BLOCK_BYTES
from planner.layout import Choice
from planner.linear import Expression, LinearProgram, total
from planner.problem import StageProblem

__all__ = ["Program", "Solution", "relaxed_bound", "solve"]

Segments = list[list[tuple[int, int, Choice]]]
Moments = tuple[tuple[tuple[int, ...], ...], ...]

RESOLUTION = 2.0**-22
"""What the integers can tell apart, as a share of the slowest rank's least time: rounding a layer
to whole units moves the sum over all layers by half of it at most."""

LARGEST = 2.0**52
"""Above any objective, and still whole in a double."""

NOTHING = Expression([])


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solve found: `status` is optimal, feasible, infeasible or unknown."""

    status: str
    segments: Segments | None
    objective_s: float
    bound_s: float


class Program:
    """The program of one StageProblem."""

    def __init__(self, problem: StageProblem, moments: Moments, *, least_slowest_s: float,
                 most_s: float = math.inf) -> None:
        """Args:
            moments: per rank, those of the schedule that are looked at.
            least_slowest_s: a valid lower bound of the slowest rank's time.
            most_s: only answers up to this step time are wanted.
        """
        self.problem = problem
        self.moments = moments
        self.p = problem.candidate.mesh.pp
        self.v = problem.candidate.schedule.chunks
        self.m = problem.candidate.num_micro_batches
        self.most_s = most_s
        self.unit_s = max(least_slowest_s, 1e-9) * RESOLUTION / problem.num_layers
        self.model = LinearProgram()
        self._order()
        self._counts()
        self._ties()
        self._times(least_slowest_s)
        self._tails()
        for i in range(self.p):
            self._memory(i)
        self._objective()

    # --- helpers

    def _units(self, seconds: float) -> int:
        return round(seconds / self.unit_s)

    def _stages_of(self, i: int) -> range:
        return range(i, self.problem.num_stages, self.p)

    def _here(self, k: int, r: int) -> Expression:
        """Layers of run r in stage k."""
        return self.y[k][r] - self.y[k - 1][r] if k else self.y[k][r]

    def _rank_sum(self, i: int, coefficient: Callable[[LayerCost], int]) -> Expression:
        """Sum of coefficient * layers over the layers of rank i, all chunks."""
        cls = self.problem.rank_class[i]
        parts = []
        for r, options in enumerate(self.problem.options):
            for o, option in enumerate(options):
                weight = coefficient(option.costs[cls])
                if weight:
                    parts += [self.x[k][r][o] * weight for k in self._stages_of(i)]
        return total(parts)

    # --- constraints

    def _layers_by(self, k: int) -> tuple[int, int]:
        """Least and most layers in stages 0..k."""
        layers, stages = self.problem.num_layers, self.problem.num_stages
        if k == stages - 1:
            return layers, layers
        return k + 1, layers - (stages - 1 - k)

    def _count_range(self, k: int, r: int) -> tuple[int, int]:
        """Least and most layers of run r in stages 0..k."""
        run = self.problem.runs[r]
        if self.v == 1:
            least, most = self._layers_by(k)
            return (max(0, min(run.count, least - run.first)),
                    max(0, min(run.count, most - run.first)))
        # Interleaved: equally many blocks in each stage, what comes before and after at the ends.
        block = next(i for i, other in enumerate(self.problem.runs) if other.count > 1)
        last = k == self.problem.num_stages - 1
        done = (run.count * (k + 1) // self.problem.num_stages if r == block
                else run.count if r < block or last else 0)
        return done, done

    def _order(self) -> None:
        """(1) y, S and F."""
        runs, stages = self.problem.runs, self.problem.num_stages
        self.y: list[list[Expression]] = []
        self.started: list[list[Expression]] = []
        self.finished: list[list[Expression]] = []
        for k in range(stages):
            row, started, finished = [], [], []
            for r, run in enumerate(runs):
                low, high = self._count_range(k, r)
                count = self.model.variable(low, high)
                row.append(count)
                if run.count == 1:
                    started.append(count)
                    finished.append(count)
                    continue
                begun = self.model.variable(int(low > 0), int(high > 0))
                done = self.model.variable(int(low == run.count), int(high == run.count))
                self.model.at_least(count - begun)
                self.model.at_least(run.count * begun - count)
                self.model.at_least(count - run.count * done)
                self.model.at_least(done - count, 1 - run.count)
                started.append(begun)
                finished.append(done)
            for r in range(1, len(runs)):
                self.model.at_least(finished[r - 1] - started[r])
            self.y.append(row)
            self.started.append(started)
            self.finished.append(finished)
            self._follow(k)

    def _follow(self, k: int) -> None:
        here = total(self._here(k, r) for r in range(len(self.problem.runs)))
        self.model.at_least(here, 1)
        if k:
            for rows in (self.y, self.started, self.finished):
                for before, now in zip(rows[k - 1], rows[k], strict=True):
                    self.model.at_least(now - before)

    def _counts(self) -> None:
        """(2) x[k][r][o]."""
        self.x: list[list[list[Expression]]] = []
        for k in range(self.problem.num_stages):
            row = []
            for r, options in enumerate(self.problem.options):
                here = self._here(k, r)
                if len(options) == 1:
                    row.append([here])
                elif here.is_constant and here.constant == 0:
                    row.append([NOTHING] * len(options))
                else:
                    most = self.problem.runs[r].count
                    counts = [self.model.variable(0, most) for _ in options]
                    self.model.equal(total(counts), here)
                    row.append(counts)
            self.x.append(row)

    def _ties(self) -> None:
        """(3) z[g][i]."""
        self.z: list[list[Expression]] = []
        for runs, _, _ in self.problem.ties:
            row = []
            for i in range(self.p):
                held = [self._here(k, r) for k in self._stages_of(i) for r in runs]
                certain = any(h.is_constant and h.constant > 0 for h in held)
                possible = any(not h.is_constant for h in held)
                flag = self.model.variable(int(certain), int(certain or possible))
                for h in held:
                    self.model.at_least(flag - h)
                row.append(flag)
            self.z.append(row)

    def _cut(self, k: int, name: str, scale: float) -> Expression:
        """What the cut after stage k costs: inside a run, or after it."""
        problem, i = self.problem, k % self.p
        parts = []
        for r, run in enumerate(problem.runs):
            inside = round(getattr(problem.inside[i][r], name) / scale)
            after = round(getattr(problem.after[i][r], name) / scale)
            following = self.started[k][r + 1] if r + 1 < len(problem.runs) else NOTHING
            if inside and run.count > 1:
                parts.append((self.started[k][r] - self.finished[k][r]) * inside)
            if after:
                parts.append((self.finished[k][r] - following) * after)
        return total(parts)

    def _times(self, least_slowest_s: float) -> None:
        """(4) The slowest rank."""
        problem = self.problem
        forward, backward = [], []
        for i in range(self.p):
            ahead = [self._rank_sum(i, lambda c: self._units(c.forward_s))]
            back = [self._rank_sum(i, lambda c: self._units(c.backward_s))]
            for k in self._stages_of(i):
                if k > 0:
                    ahead.append(self._cut(k - 1, "forward_s", self.unit_s))
                if k + 1 < problem.num_stages:
                    back.append(self._cut(k, "backward_s", self.unit_s))
            forward.append(total(ahead))
            backward.append(total(back))
        self.rank_time = [a + b for a, b in zip(forward, backward, strict=True)]
        if self.p == 1:
            self.slowest = self.rank_time[0]
            return
        # Rounding moves a rank's sum by at most half a unit a layer and a unit a cut.
        slack = problem.num_layers + 2 * self.v
        ceiling = self._units(self._ceiling_s()) + 2 * slack
        least = max(0, math.floor(least_slowest_s / self.unit_s) - slack)
        # A step is at least m times its slowest rank, so a wanted answer bounds that as well.
        most = (self.most_s / self.m / self.unit_s + slack if math.isfinite(self.most_s)
                else ceiling)
        self.slowest = self._slowest(self.rank_time, least,
                                     max(least, min(ceiling, math.ceil(most))))
        if problem.candidate.schedule.name == "gpipe":
            both = (self._slowest(forward, 0, ceiling)
                    + self._slowest(backward, 0, ceiling))
            self.model.at_least(both - self.slowest)
            self.slowest = both

    def _ceiling_s(self) -> float:
        """More seconds than any rank can need for one micro-batch: every layer at its slowest."""
        problem = self.problem
        layers = sum(run.count * max(c.forward_s + c.backward_s for o in options for c in o.costs)
                     for run, options in zip(problem.runs, problem.options, strict=True))
        cuts = max((c.forward_s + c.backward_s for rows in (problem.inside, problem.after)
                    for row in rows for c in row), default=0.0)
        return layers + 2 * self.v * cuts

    def _slowest(self, times: list[Expression], least: float, most: float) -> Expression:
        slowest = self.model.variable(least, most)
        for time in times:
            self.model.at_least(slowest - time)
        return slowest

    def _tails(self) -> None:
        """(5) The longest tail."""
        problem = self.problem
        self.tail = self.model.variable(0, self._units(self._longest_tail_s()))
        for i in range(self.p):
            cls = problem.rank_class[i]
            slowdown = problem.contexts[cls].group.overlap_slowdown
            forms = ([(1.0, 0.0)] if not problem.overlaps
                     else [(slowdown - 1.0, 0.0), (1.0, 2.0 - slowdown)])
            for share, hidden in forms:
                def after(cost: LayerCost, share: float = share, hidden: float = hidden) -> int:
                    p = cost.parameters
                    return self._units(p.optimizer_s + p.norm_s + share * p.reduce_s
                                       - hidden * cost.window_s)
                tail = self._rank_sum(i, after)
                for g, (_, costs, _) in enumerate(problem.ties):
                    p = costs[cls].parameters
                    tail += self.z[g][i] * self._units(
                        p.gather_s + p.reduce_each_s + p.optimizer_s + p.norm_s
                        + share * p.reduce_s)
                self.model.at_least(self.tail - tail)

    def _longest_tail_s(self) -> float:
        """More seconds than any tail: everything exposed, on one rank."""
        problem = self.problem
        parameters = [(run.count, c.parameters) for run, options in
                      zip(problem.runs, problem.options, strict=True)
                      for o in options for c in o.costs]
        parameters += [(1, cost.parameters) for _, costs, _ in problem.ties for cost in costs]
        return 1e-6 + sum(n * (p.gather_s + p.reduce_each_s + p.optimizer_s + p.norm_s
                               + p.reduce_s) for n, p in parameters)

    def _memory(self, i: int) -> None:
        """(6) Rank i at every moment."""
        problem, cls = self.problem, self.problem.rank_class[i]
        capacity = Expression([], problem.capacity_bytes[i] // BLOCK_BYTES)
        static = self._rank_sum(i, lambda c: c.memory.static_bytes // BLOCK_BYTES)
        temporary = self._rank_sum(i, lambda c: c.memory.optimizer_temporary_bytes // BLOCK_BYTES)
        for g, (_, costs, _) in enumerate(problem.ties):
            static += self.z[g][i] * (costs[cls].static_bytes // BLOCK_BYTES)
            temporary += self.z[g][i] * (costs[cls].temporary_bytes // BLOCK_BYTES)
        if temporary.terms or temporary.constant:
            self.model.at_least(capacity - static - temporary)
        room = capacity - static - self._working_set(i)
        chunks = [self._chunk_blocks(k, cls) for k in self._stages_of(i)]
        for moment in self.moments[i]:
            self.model.at_least(room - total(
                chunk * count for chunk, count in zip(chunks, moment, strict=True)))

    def _chunk_blocks(self, k: int, cls: int) -> Expression:
        """What stage k holds of one micro-batch: activations and its output."""
        parts = [self.x[k][r][o] * (option.costs[cls].memory.activation_bytes // BLOCK_BYTES)
                 for r, options in enumerate(self.problem.options)
                 for o, option in enumerate(options)]
        if k + 1 < self.problem.num_stages:
            parts.append(self._cut(k, "held_bytes", BLOCK_BYTES))
        return total(parts)

    def _working_set(self, i: int) -> Expression:
        """The largest working set among the layers of rank i."""
        problem, cls = self.problem, self.problem.rank_class[i]
        needs: list[tuple[int, Expression, int]] = []
        certain = 0
        least_of_possible = math.inf
        for r, options in enumerate(problem.options):
            sizes = [o.costs[cls].memory.working_set_bytes // BLOCK_BYTES for o in options]
            here = [self._here(k, r) for k in self._stages_of(i)]
            if any(h.is_constant and h.constant > 0 for h in here):
                certain = max(certain, min(sizes))
            if any(h.terms or h.constant for h in here):
                least_of_possible = min(least_of_possible, *sizes)
            for o, size in enumerate(sizes):
                count = total(self.x[k][r][o] for k in self._stages_of(i))
                if count.terms:
                    needs.append((size, count, problem.runs[r].count))
                elif count.constant:
                    certain = max(certain, size)
        # Every rank has a layer of some run, so the least of them all is needed in any case.
        certain = max(certain, 0 if math.isinf(least_of_possible) else int(least_of_possible))
        needs = [need for need in needs if need[0] > certain]
        if not needs:
            return Expression([], certain)
        largest = self.model.variable(certain, max(size for size, _, _ in needs))
        for size, count, most in needs:
            used = self.model.variable(0, 1)
            self.model.at_least(used * most - count)
            self.model.at_least(largest - Expression([], certain) - used * (size - certain))
        return largest

    def _objective(self) -> None:
        """v times the step, so that every coefficient is whole."""
        parts = [self.slowest * (self.m * self.v - 1), self.tail * self.v, *self.rank_time,
                 Expression([], self._units(self.problem.rest_s) * self.v)]
        for g, (_, _, seconds) in enumerate(self.problem.ties):
            again = total(self.z[g]) - Expression([], 1)
            parts.append(again * (self.v * self._units(seconds)))
        objective = total(parts)
        self.model.minimise(objective)
        if math.isfinite(self.most_s):
            most = math.floor(self.most_s / self.unit_s * self.v)
            self.model.at_least(objective * -1, -most)

    # --- lift

    def seconds(self, objective: float) -> float:
        """An objective value as seconds of a step."""
        return objective * self.unit_s / self.v

    def lift(self, values: list[float]) -> Segments:
        """The stages of a solution."""
        return [[(r, count, option.choice)
                 for r, options in enumerate(self.problem.options)
                 for o, option in enumerate(options)
                 if (count := round(self.x[k][r][o].value(values)))]
                for k in range(self.problem.num_stages)]


def relaxed_bound(problem: StageProblem, least_slowest_s: float) -> float:
    """Lower bound of the step time from the linear relaxation; inf if even that is infeasible."""
    moments = tuple((problem.first_moment(i),) for i in range(problem.candidate.mesh.pp))
    program = Program(problem, moments, least_slowest_s=least_slowest_s)
    result = program.model.solve(integer=False)
    if result.status == "infeasible":
        return math.inf
    return program.seconds(result.bound) if result.status == "optimal" else 0.0


def solve(problem: StageProblem, *, least_slowest_s: float, most_s: float = math.inf,
          deterministic_time: float, time_limit_s: float | None = None) -> Solution:
    """Solve one candidate to optimality, or until the deterministic limit.

    The limit is CP-SAT's deterministic time, and seed and workers are fixed, so that the same
    problem gives the same answer on every machine; `time_limit_s` is a last resort.
    """
    p = problem.candidate.mesh.pp
    moments: list[tuple[tuple[int, ...], ...]] = [(problem.first_moment(i),) for i in range(p)]
    parameters = (f"num_workers:1 random_seed:0 max_deterministic_time:{deterministic_time} "
                  f"mip_max_bound:{LARGEST} mip_max_activity_exponent:60")
    while True:
        program = Program(problem, tuple(moments), least_slowest_s=least_slowest_s, most_s=most_s)
        result = program.model.solve(integer=True, parameters=parameters,
                                     time_limit_s=time_limit_s)
        if result.status == "infeasible":
            return Solution("infeasible", None, math.inf, math.inf)
        if result.values is None:
            return Solution("unknown", None, math.inf, 0.0)
        segments = program.lift(result.values)
        more = problem.violated_moments(segments)
        if not more:
            return Solution(result.status, segments, program.seconds(result.objective),
                            program.seconds(result.bound))
        for i, moment in more:
            moments[i] = (*moments[i], moment)
