"""The integer program: cut a chain of runs into stages and choose per-layer options.

Sets
    k in 0..K-1      stages, K = p*v; stage k runs on pipeline rank k mod p
    r in runs        neighbouring equal layers, n_r of them; o in O_r its options
    i in 0..p-1      pipeline ranks; g tied parameters with their runs R_g

Parameters (times in units of `unit_s`, memory in blocks of 512 bytes)
    f, b[r,o,i]      forward, backward time of a layer            a, q, w[r,o,i]  activations, static
    h[r,o,i]         once-a-step time                                             bytes, working set
    c^in, c^after    receiving times of a cut inside / after run r
    M_i              memory of a rank, N_i moments of its schedule (micro-batches in flight per chunk)

Variables
    y[k,r]           layers of run r in stages 0..k               x[k,r,o]  of stage k with option o
    S[k,r], F[k,r]   run r is started / finished by stage k       u[i,r,o]  rank i uses option o
    T (or TF, TB)    slowest rank        A  longest tail          W[i]      working set of rank i
    z[g,i]           rank i holds tied parameter g                t[i]      time of a rank

Objective: minimise (m - 1/v) T + (1/v) sum_i t[i] + A + ties + rest        (planner/pricing.py)

Constraints, each by its function
    (1) _order        runs follow one another; every stage has a layer
    (2) _counts       options of a run's layers in a stage add up to its layers there
    (3) _times        T is at least the time of each rank, sends included
    (4) _tails        A is at least what follows the last backward on each rank, exposed reductions included
    (5) _memory       at each moment of the schedule, and in the optimizer step, each rank fits
    (6) _ties         a tied parameter costs memory and time wherever a layer of it lies
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from ortools.math_opt.python import mathopt
from ortools.sat import sat_parameters_pb2

from planner.cost.memory import BLOCK_BYTES
from planner.layout import Choice
from planner.problem import StageProblem

__all__ = ["Program", "Solution", "relaxed_bound", "solve"]

Segments = list[list[tuple[int, int, Choice]]]
Expression = mathopt.LinearTypes

RESOLUTION = 2.0**-22
"""Time unit as a share of the slowest rank's least time: what the integers can tell apart."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solve found: `status` is optimal, feasible, infeasible or unknown."""

    status: str
    segments: Segments | None
    bound_s: float


class Program:
    """The program of one StageProblem, integer or relaxed."""

    def __init__(self, problem: StageProblem, *, least_slowest_s: float, integer: bool,
                 most_s: float = math.inf) -> None:
        """Args:
            least_slowest_s: a valid lower bound of the slowest rank's time.
            most_s: only answers below this step time are wanted.
        """
        self.problem = problem
        self.integer = integer
        self.p = problem.candidate.mesh.pp
        self.v = problem.candidate.schedule.chunks
        self.m = problem.candidate.num_micro_batches
        self.unit_s = max(least_slowest_s, 1e-9) * RESOLUTION
        self.model = mathopt.Model()
        self.gpipe = problem.candidate.schedule.name == "gpipe"
        self._order()
        self._counts()
        self._ties()
        self._times(least_slowest_s)
        self._tails()
        self._memory()
        self._objective(most_s)

    # --- helpers

    def _int(self, low: float, high: float) -> mathopt.Variable:
        return self.model.add_variable(lb=low, ub=high, is_integer=self.integer)

    def _units(self, seconds: float) -> int:
        return round(seconds / self.unit_s)

    def _rank(self, k: int) -> int:
        return k % self.p

    # --- constraints

    def _order(self) -> None:
        """(1) Cumulative counts y, started and finished flags."""
        runs, stages = self.problem.runs, self.problem.num_stages
        add = self.model.add_linear_constraint
        self.y: list[list[Expression]] = []
        self.started: list[list[Expression]] = []
        self.finished: list[list[Expression]] = []
        total, layers_before = self.problem.num_layers, [run.first for run in runs]
        for k in range(stages):
            row: list[Expression] = []
            started: list[Expression] = []
            finished: list[Expression] = []
            for run, before in zip(runs, layers_before, strict=True):
                # Stages 0..k hold at least k+1 layers and leave one for each stage that follows.
                most = min(run.count, max(0, total - (stages - 1 - k) - before))
                least = max(0, min(run.count, k + 1 - before))
                if k == stages - 1 or least == most:
                    value = run.count if k == stages - 1 else least
                    row.append(value)
                    started.append(int(value > 0))
                    finished.append(int(value == run.count))
                elif run.count == 1:
                    flag = self._int(0, 1)
                    row.append(flag)
                    started.append(flag)
                    finished.append(flag)
                else:
                    count = self._int(least, most)
                    row.append(count)
                    begun, done = self._int(0, 1), self._int(0, 1)
                    add(count >= begun)
                    add(count <= run.count * begun)
                    add(count >= run.count * done)
                    started.append(begun)
                    finished.append(done)
            for r in range(1, len(runs)):
                self._require(started[r], finished[r - 1])
            self.y.append(row)
            self.started.append(started)
            self.finished.append(finished)
            if k:
                for r in range(len(runs)):
                    self._require(self.y[k - 1][r], row[r])
                    if runs[r].count > 1:
                        self._require(self.started[k - 1][r], started[r])
                        self._require(self.finished[k - 1][r], finished[r])
                here, before_ = mathopt.fast_sum(row), mathopt.fast_sum(self.y[k - 1])
                self._at_least(here - before_, 1)

    def _require(self, less: Expression, more: Expression) -> None:
        """less <= more, where either may be a constant."""
        self._at_least(more - less, 0)

    def _at_least(self, expression: Expression, low: float) -> None:
        if isinstance(expression, (int, float)):
            if expression < low:
                self.model.add_linear_constraint(lb=1, ub=0, expr=0)
        else:
            self.model.add_linear_constraint(expression >= low)

    def _counts(self) -> None:
        """(2) x[k][r][o]: layers of run r in stage k with option o."""
        problem = self.problem
        self.x: list[list[list[Expression]]] = []
        for k in range(problem.num_stages):
            row = []
            for r, run in enumerate(problem.runs):
                here = self.y[k][r] - (self.y[k - 1][r] if k else 0)
                if isinstance(here, (int, float)) and here == 0:
                    row.append([0] * len(problem.options[r]))
                    continue
                if len(problem.options[r]) == 1:
                    row.append([here])
                    continue
                counts = [self._int(0, run.count) for _ in problem.options[r]]
                self.model.add_linear_constraint(mathopt.fast_sum(counts) - here == 0)
                row.append(counts)
            self.x.append(row)

    def _ties(self) -> None:
        """(6) z[g][i]: rank i holds tied parameter g."""
        self.z: list[list[Expression]] = []
        for runs, _, _ in self.problem.ties:
            row: list[Expression] = []
            for i in range(self.p):
                held = [self.y[k][r] - (self.y[k - 1][r] if k else 0)
                        for k in range(i, self.problem.num_stages, self.p) for r in runs]
                constants = [h for h in held if isinstance(h, (int, float))]
                if any(h > 0 for h in constants):
                    row.append(1)
                elif len(constants) == len(held):
                    row.append(0)
                else:
                    flag = self._int(0, 1)
                    for h in held:
                        self._require(h, flag)
                    row.append(flag)
            self.z.append(row)

    def _rank_sum(self, i: int, coefficient) -> list[Expression]:  # type: ignore[no-untyped-def]
        """Terms coefficient(cost) * x over the layers of rank i, all chunks."""
        cls = self.problem.rank_class[i]
        return [coefficient(option.costs[cls]) * self.x[k][r][o]
                for k in range(i, self.problem.num_stages, self.p)
                for r, options in enumerate(self.problem.options)
                for o, option in enumerate(options)
                if not (isinstance(self.x[k][r][o], int) and self.x[k][r][o] == 0)]

    def _cut_terms(self, k: int, name: str, scale: float) -> list[Expression]:
        """What the cut after stage k costs: inside a run, or after it."""
        problem, i = self.problem, self._rank(k)
        terms: list[Expression] = []
        for r in range(len(problem.runs)):
            inside = getattr(problem.inside[i][r], name) / scale
            after = getattr(problem.after[i][r], name) / scale
            following = self.started[k][r + 1] if r + 1 < len(problem.runs) else 0
            if inside and problem.runs[r].count > 1:
                terms.append(round(inside) * (self.started[k][r] - self.finished[k][r]))
            if after:
                terms.append(round(after) * (self.finished[k][r] - following))
        return terms

    def _times(self, least_slowest_s: float) -> None:
        """(3) The slowest rank."""
        problem, stages = self.problem, self.problem.num_stages
        forward: list[list[Expression]] = []
        backward: list[list[Expression]] = []
        for i in range(self.p):
            ahead = self._rank_sum(i, lambda c: self._units(c.forward_s))
            back = self._rank_sum(i, lambda c: self._units(c.backward_s))
            for k in range(i, stages, self.p):
                if k > 0:
                    ahead += self._cut_terms(k - 1, "forward_s", self.unit_s)
                if k + 1 < stages:
                    back += self._cut_terms(k, "backward_s", self.unit_s)
            forward.append(ahead)
            backward.append(back)
        self.rank_time = [mathopt.fast_sum(a + b)
                          for a, b in zip(forward, backward, strict=True)]
        least = max(0, math.floor(least_slowest_s / self.unit_s) - problem.num_layers)
        self.slowest = self._slowest(self.rank_time, least)
        if self.gpipe and self.p > 1:
            both = (self._slowest([mathopt.fast_sum(a) for a in forward], 0)
                    + self._slowest([mathopt.fast_sum(b) for b in backward], 0))
            self._at_least(both - self.slowest, 0)
            self.slowest = both

    def _slowest(self, times: list[Expression], least: float) -> Expression:
        if len(times) == 1:
            return times[0]
        slowest = self._int(least, math.inf if not self.integer else 2.0**40)
        for time in times:
            self._at_least(slowest - time, 0)
        return slowest

    def _tails(self) -> None:
        """(4) The longest tail."""
        problem = self.problem
        tails: list[Expression] = []
        for i in range(self.p):
            slowdown = problem.contexts[problem.rank_class[i]].group.overlap_slowdown
            forms = ([(1.0, 0.0)] if not problem.overlaps
                     else [(slowdown - 1.0, 0.0), (1.0, 2.0 - slowdown)])
            for share, hidden in forms:
                def seconds(cost, share=share, hidden=hidden):  # type: ignore[no-untyped-def]
                    p = cost.parameters
                    window = getattr(cost, "window_s", 0.0)
                    return self._units(cost.once_gather_s + p.optimizer_s + p.norm_s
                                       + share * p.reduce_s - hidden * window)
                terms = self._rank_sum(i, seconds)
                for g, (_, costs, _) in enumerate(problem.ties):
                    terms.append(seconds(costs[problem.rank_class[i]]) * self.z[g][i])
                tails.append(mathopt.fast_sum(terms))
        self.tail = self._int(0, math.inf if not self.integer else 2.0**40)
        for tail in tails:
            self._at_least(self.tail - tail, 0)

    def _memory(self) -> None:
        """(5) Every rank at every moment."""
        for i in range(self.p):
            self._rank_memory(i)

    def _rank_memory(self, i: int) -> None:
        problem, cls = self.problem, self.problem.rank_class[i]
        capacity = problem.capacity_bytes[i] // BLOCK_BYTES
        static = self._rank_sum(i, lambda c: c.memory.static_bytes // BLOCK_BYTES)
        temporary = self._rank_sum(i, lambda c: c.memory.optimizer_temporary_bytes // BLOCK_BYTES)
        for g, (_, costs, _) in enumerate(problem.ties):
            static.append(costs[cls].static_bytes // BLOCK_BYTES * self.z[g][i])
            temporary.append(costs[cls].temporary_bytes // BLOCK_BYTES * self.z[g][i])
        if any(o.costs[cls].memory.optimizer_temporary_bytes
               for options in problem.options for o in options):
            self._at_least(capacity - mathopt.fast_sum(static + temporary), 0)
        working = self._working_set(i)
        for moment in problem.moments[i]:
            held = list(static)
            for chunk, count in enumerate(moment):
                k = chunk * self.p + i
                for r, options in enumerate(problem.options):
                    for o, option in enumerate(options):
                        blocks = option.costs[cls].memory.activation_bytes // BLOCK_BYTES
                        held.append(count * blocks * self.x[k][r][o])
                if k + 1 < problem.num_stages:
                    held += [count * term
                             for term in self._cut_terms(k, "held_bytes", BLOCK_BYTES)]
            self._at_least(capacity - working - mathopt.fast_sum(held), 0)

    def _working_set(self, i: int) -> Expression:
        """The largest working set among the layers of rank i."""
        problem, cls = self.problem, self.problem.rank_class[i]
        stages = range(i, problem.num_stages, self.p)
        needs: list[tuple[int, Expression, int]] = []
        certain = 0
        for r, options in enumerate(problem.options):
            sizes = [o.costs[cls].memory.working_set_bytes // BLOCK_BYTES for o in options]
            here = mathopt.fast_sum([self.y[k][r] - (self.y[k - 1][r] if k else 0)
                                     for k in stages])
            if isinstance(here, (int, float)) and here > 0:
                certain = max(certain, min(sizes))
            for o, size in enumerate(sizes):
                count = mathopt.fast_sum([self.x[k][r][o] for k in stages])
                needs.append((size, count, problem.runs[r].count))
        needs = [n for n in needs if n[0] > certain and not isinstance(n[1], (int, float))]
        if not needs:
            return certain
        largest = self._int(certain, max(size for size, _, _ in needs))
        for size, count, most in needs:
            used = self._int(0, 1)
            self._at_least(most * used - count, 0)
            self._at_least(largest - size * used, 0)
        return largest

    def _objective(self, most_s: float) -> None:
        """v times the step, so that every coefficient is whole."""
        constant = self._units(self.problem.rest_s) * self.v
        terms: list[Expression] = [(self.m * self.v - 1) * self.slowest, self.v * self.tail]
        terms += self.rank_time
        for g, (_, _, seconds) in enumerate(self.problem.ties):
            holders = mathopt.fast_sum(self.z[g])
            terms.append(self.v * self._units(seconds) * (holders - 1))
        self.objective = mathopt.fast_sum(terms) + constant
        self.model.minimize(self.objective)
        if math.isfinite(most_s):
            most = math.floor(most_s / self.unit_s * self.v)
            self._at_least(most - self.objective, 0)

    # --- lift

    def seconds(self, objective: float) -> float:
        """An objective value as seconds of a step."""
        return objective * self.unit_s / self.v

    def lift(self, values: dict[mathopt.Variable, float]) -> Segments:
        """The stages of a solution."""
        def value(expression: Expression) -> int:
            if isinstance(expression, (int, float)):
                return int(expression)
            return round(mathopt.evaluate_expression(expression, values))
        stages: Segments = []
        for k in range(self.problem.num_stages):
            stage = []
            for r, options in enumerate(self.problem.options):
                for o, option in enumerate(options):
                    count = value(self.x[k][r][o])
                    if count:
                        stage.append((r, count, option.choice))
            stages.append(stage)
        return stages


def relaxed_bound(problem: StageProblem, least_slowest_s: float) -> float:
    """Lower bound of the step time from the linear relaxation; inf if that is infeasible."""
    program = Program(problem, least_slowest_s=least_slowest_s, integer=False)
    result = mathopt.solve(program.model, mathopt.SolverType.GLOP)
    reason = result.termination.reason
    if reason == mathopt.TerminationReason.OPTIMAL:
        return program.seconds(result.objective_value())
    if reason in (mathopt.TerminationReason.INFEASIBLE,
                  mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return math.inf
    return 0.0


def solve(problem: StageProblem, *, least_slowest_s: float, most_s: float = math.inf,
          deterministic_time: float, time_limit_s: float | None = None) -> Solution:
    """Solve one candidate to optimality, or until the deterministic limit.

    The limit is CP-SAT's deterministic time and the seed and workers are fixed, so that the same problem
    gives the same answer on every machine; `time_limit_s` is a last resort.
    """
    program = Program(problem, least_slowest_s=least_slowest_s, integer=True, most_s=most_s)
    parameters = mathopt.SolveParameters(
        random_seed=0,
        time_limit=None if time_limit_s is None else timedelta(seconds=time_limit_s),
        cp_sat=sat_parameters_pb2.SatParameters(
            num_workers=1, max_deterministic_time=deterministic_time, mip_max_bound=2.0**50))
    result = mathopt.solve(program.model, mathopt.SolverType.CP_SAT, params=parameters)
    reason = result.termination.reason
    if reason == mathopt.TerminationReason.INFEASIBLE:
        return Solution("infeasible", None, math.inf)
    bound = program.seconds(result.termination.objective_bounds.dual_bound)
    if not result.has_primal_feasible_solution():
        return Solution("unknown", None, bound)
    status = "optimal" if reason == mathopt.TerminationReason.OPTIMAL else "feasible"
    return Solution(status, program.lift(result.variable_values()), bound)
