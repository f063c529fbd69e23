"""Models of one repeated block: the cut as a program over ranks, the choices as a knapsack a rank.

Most models are a run of N equal blocks with a few layers before (embedding) and after (norm, head).
Once those are given to stages, a stage is known by how many blocks it has, and the stage problem
falls apart:

    h_i(n)   least seconds of pipeline rank i with n blocks in its memory (planner/choices.py)
    e_i(n)   what follows its last backward; the same for all choices (where there is one rank, it
             is added to their seconds)

    minimise    (m - 1/v) T + (1/v) sum_i h_i(n_i) + A
    so that (1) sum_i n_i = N
            (2) T >= h_i(n_i), A >= e_i(n_i)          for every rank

with one 0/1 variable u[i,n] for each rank and number of blocks, (1) and (2) linear in them. h_i
starts as its fractional relaxation (`planner/waterfill.py`) and is made exact where an answer uses
it; when all that are used are exact, the answer is optimal. The stages of interleaved schedules
have N/K blocks each.

`planner/block_forms.py` finds the ways to spread what lies before and after; problems that have
none, or too many, go to `planner/formulation.py`.
"""

from __future__ import annotations

import math
import sys
from itertools import product

from planner.block_forms import BlockForm
from planner.choices import Group, best_choices
from planner.cost.layer import LayerCost, ParameterCost
from planner.cost.pipeline import in_flight
from planner.costing import CutCost
from planner.layout import Choice
from planner.linear import LinearProgram, total
from planner.problem import StageProblem
from planner.waterfill import Waterfill

__all__ = ["Blocks"]

Segments = list[list[tuple[int, int, Choice]]]
Moment = tuple[int, ...]

MOST_SPREADS = 1000
"""Up to so many ways to spread the blocks are looked at one by one: sooner done than the solver is
loaded."""

RESOLUTION = 2.0**-24
"""Time unit of the program as a share of the slowest rank's least time."""


class Blocks:
    """The decomposed solve of one problem in block form."""

    def __init__(self, problem: StageProblem, form: BlockForm, filled: Waterfill) -> None:
        self.problem = problem
        self.form = form
        self.filled = filled
        self.p = problem.candidate.mesh.pp
        self.v = problem.candidate.schedule.chunks
        self.m = problem.candidate.num_micro_batches
        self.count = problem.runs[form.main].count
        self.picks: dict[tuple[int, int], tuple[float, list[tuple[int, int, list[int]]]]] = {}
        self.same: dict[object, tuple[float, list[tuple[int, int, list[int]]]]] = {}

    # --- one rank

    def exact(self, i: int, n: int) -> float:
        """h_i(n), and remember the choices that reach it; inf if nothing fits."""
        if (i, n) not in self.picks:
            key = (self.filled.keys[i], n, self.form.before[i], self.form.after[i],
                   self.form.last[i])
            if key not in self.same:
                self.same[key] = self._exact(i, n)
            seconds, picks = self.same[key]
            self.picks[i, n] = seconds + self._receive_s(i), picks
        return self.picks[i, n][0]

    def _exact(self, i: int, n: int) -> tuple[float, list[tuple[int, int, list[int]]]]:
        """h_i(n) without receiving, which ranks of one kind need not have in common."""
        problem, cls = self.problem, self.problem.rank_class[i]
        place: list[tuple[int, int]] = []  # (chunk, run) of each group
        groups = []
        for c in range(self.v):
            for r in self._runs_of(i, c):
                count = (n // self.v if self.p > 1 and r == self.form.main
                         else problem.runs[r].count)
                if count:
                    place.append((c, r))
                    groups.append(Group(count, c, tuple(
                        _figures(o.costs[cls], self._folded_s(o.costs[cls].parameters))
                        for o in problem.options[r])))
        moments = [problem.first_moment(i)]
        tied_bytes, tied_temporary_bytes = self._tied_bytes(i)
        room = problem.capacity_bytes[i] - tied_bytes
        step_room: int | None = None  # looked at where an answer does not fit the optimizer step
        while True:
            found = best_choices(groups, moments, [
                room - self._held_bytes(i, moment) for moment in moments], step_room)
            if found is None:
                return math.inf, []
            worst = self._worst(i, groups, found[1])
            if worst not in moments:
                moments.append(worst)
            elif step_room is None and _step_bytes(groups, found[1]) > room - tied_temporary_bytes:
                step_room = room - tied_temporary_bytes
            else:
                picks = [(c, r, counts) for (c, r), counts in zip(place, found[1], strict=True)]
                return found[0], picks

    def _runs_of(self, i: int, c: int) -> list[int]:
        if self.p == 1:
            return list(range(len(self.problem.runs)))
        runs = [self.form.main] if self.form.blocks[i] else []
        if c == 0:
            runs = [*self.form.before[i], *runs]
        if c == self.v - 1:
            runs += self.form.after[i]
        return runs

    def _worst(self, i: int, groups: list[Group], picks: list[list[int]]) -> Moment:
        """The moment of the schedule at which these choices need the most; known ones first."""
        held = [0] * self.v
        for group, counts in zip(groups, picks, strict=True):
            held[group.chunk] += sum(n * o[2] for n, o in zip(counts, group.options, strict=True))

        def need(moment: Moment) -> int:
            return self._held_bytes(i, moment) + sum(
                n * h for n, h in zip(moment, held, strict=True))
        first = self.problem.first_moment(i)
        if self.v == 1:
            return first
        worst = max(in_flight(self.problem.candidate.schedule.name, self.p, self.v, self.m, i),
                    key=need)
        return worst if need(worst) > need(first) else first

    def _held_bytes(self, i: int, moment: Moment) -> int:
        last = self.p * self.v - 1
        size = self._cut_after(i).held_bytes
        return sum(n * size for c, n in enumerate(moment) if c * self.p + i < last)

    def _cut_after(self, i: int) -> CutCost:
        """What the cuts behind the stages of rank i cost."""
        last = self.form.last[i]
        return (self.problem.inside[i][self.form.main] if last is None
                else self.problem.after[i][last])

    def _tied_bytes(self, i: int) -> tuple[int, int]:
        """(static, temporary in the optimizer step) of the tied parameters that rank i holds."""
        cls = self.problem.rank_class[i]
        mine = {r for c in range(self.v) for r in self._runs_of(i, c)}
        held = [costs[cls] for runs, costs, _ in self.problem.ties if mine.intersection(runs)]
        return sum(cost.static_bytes for cost in held), sum(cost.temporary_bytes for cost in held)

    def _receive_s(self, i: int) -> float:
        """Activations from the rank before, gradients from the rank after, for every chunk."""
        if self.p == 1:
            return 0.0
        ahead = (self.v - (i == 0)) * self._cut_after((i - 1) % self.p).forward_s
        back = (self.v - (i == self.p - 1)) * self._cut_after(i).backward_s
        return ahead + back

    def _folded_s(self, once: ParameterCost) -> float:
        """What a layer of a lone rank adds to each micro-batch for what it costs once a step."""
        return self._once_s(0, once) / self.m if self.p == 1 else 0.0

    def _once_s(self, i: int, once: ParameterCost) -> float:
        """What follows the last backward of rank i for some parameters."""
        slowdown = self.problem.contexts[self.problem.rank_class[i]].group.overlap_slowdown
        share = slowdown - 1.0 if self.problem.overlaps else 1.0
        return once.optimizer_s + once.norm_s + share * once.reduce_s

    def tail_s(self, i: int, n: int) -> float:
        """e_i(n)."""
        problem, cls = self.problem, self.problem.rank_class[i]
        mine = sorted({r for c in range(self.v) for r in self._runs_of(i, c)})
        tail = 0.0
        for r in mine if self.p > 1 else ():
            count = n if r == self.form.main else problem.runs[r].count
            tail += count * self._once_s(i, problem.options[r][0].costs[cls].parameters)
        for runs, costs, _ in problem.ties:
            if set(mine).intersection(runs):
                once = costs[cls].parameters
                tail += once.gather_s + once.reduce_each_s + self._once_s(i, once)
        return tail

    def rest_s(self) -> float:
        """Constant seconds of the step."""
        rest = self.problem.rest_s
        for runs, _, seconds in self.problem.ties:
            holders = sum(any(r in runs for c in range(self.v) for r in self._runs_of(i, c))
                          for i in range(self.p))
            rest += seconds * (holders - 1)
        return rest

    # --- all ranks

    def domain(self, i: int, limit_s: float) -> list[int]:
        """Numbers of blocks that rank i may have and do in time."""
        if self.p == 1:
            return [self.count]
        if self.v > 1:
            numbers = [self.count // self.p]
        elif not self.form.blocks[i]:
            numbers = [0]
        else:
            spared = self.form.before[i] or self.form.after[i]
            numbers = list(range(0 if spared else 1, self.count + 1))
        return [n for n in numbers if self.bound(i, n) <= min(limit_s, sys.float_info.max)]

    def bound(self, i: int, n: int) -> float:
        """h_i(n) if known, else a lower bound of it."""
        if (i, n) in self.picks:
            return self.picks[i, n][0]
        return self.filled.ranks[i].seconds(n) if self.p > 1 else 0.0

    def solve(self, best_s: float, tolerance: float) -> tuple[float, Segments] | float:
        """(step seconds, stages) of the best answer, or a bound >= best_s * (1 - tolerance).

        The answer may be no better than `best_s` where that is within the tolerance.
        """
        while True:
            limit = best_s / self.m if math.isfinite(best_s) else math.inf
            answer = self._cut(limit, best_s)
            if answer is None:
                return best_s
            step_s, numbers = answer
            if step_s >= best_s * (1 - tolerance):
                return step_s
            unknown = [(i, n) for i, n in enumerate(numbers) if (i, n) not in self.picks]
            if not unknown:
                return step_s, self._segments(numbers)
            for i, n in unknown:
                self.exact(i, n)

    def _cut(self, limit_s: float, best_s: float) -> tuple[float, list[int]] | None:
        """The program: blocks of each rank, under what is known of h."""
        domains = [self.domain(i, limit_s) for i in range(self.p)]
        if not all(domains):
            return None
        tight = self._tightened(domains)
        if tight is None or not all(tight):
            return None
        domains = tight
        if all(len(d) == 1 for d in domains):
            numbers = [d[0] for d in domains]
        else:
            few = math.prod(len(d) for d in domains[:-1]) <= MOST_SPREADS
            found = self._fewest_seconds(domains) if few else self._program(domains)
            if found is None:
                return None
            numbers = found
        times = [self.bound(i, n) for i, n in enumerate(numbers)]
        if math.inf in times:
            return None
        tail = max(self.tail_s(i, n) for i, n in enumerate(numbers))
        return ((self.m - 1 / self.v) * max(times) + sum(times) / self.v + tail + self.rest_s(),
                numbers)

    def _tightened(self, domains: list[list[int]]) -> list[list[int]] | None:
        """Without the numbers that leave too many or too few blocks for the others."""
        least, most = sum(d[0] for d in domains), sum(d[-1] for d in domains)
        if not least <= self.count <= most:
            return None
        return [[n for n in d if self.count - (most - d[-1]) <= n <= self.count - (least - d[0])]
                for d in domains]

    def _fewest_seconds(self, domains: list[list[int]]) -> list[int] | None:
        """The program's answer by looking at every spread."""
        times = [{n: self.bound(i, n) for n in d} for i, d in enumerate(domains)]
        tails = [{n: self.tail_s(i, n) for n in d} for i, d in enumerate(domains)]
        best: tuple[float, list[int]] | None = None
        for numbers in product(*domains[:-1]):
            last = self.count - sum(numbers)
            if last in times[-1]:
                spread = [*numbers, last]
                seconds = [t[n] for t, n in zip(times, spread, strict=True)]
                step_s = ((self.m - 1 / self.v) * max(seconds) + sum(seconds) / self.v
                          + max(t[n] for t, n in zip(tails, spread, strict=True)))
                if step_s < (best[0] if best else math.inf):
                    best = step_s, spread
        return best and best[1]

    def _program(self, domains: list[list[int]]) -> list[int] | None:
        """CP-SAT over u[i,n]."""
        times = [[self.bound(i, n) for n in d] for i, d in enumerate(domains)]
        tails = [[self.tail_s(i, n) for n in d] for i, d in enumerate(domains)]
        unit = max(max(min(row) for row in times) * RESOLUTION, 1e-15)
        model = LinearProgram()
        use = [[model.variable(0, 1) for _ in d] for d in domains]
        finite = [[round(t / unit) if t < math.inf else None for t in row] for row in times]
        slowest = model.variable(0, max(t for row in finite for t in row if t is not None))
        tail = model.variable(0, max(round(t / unit) for row in tails for t in row))
        for row, seconds, after in zip(use, finite, tails, strict=True):
            one = total(row)
            model.equal(one, type(one)([], 1))
            for flag, t in zip(row, seconds, strict=True):
                if t is None:
                    model.at_least(flag * -1)
            here = total(f * (t or 0) for f, t in zip(row, seconds, strict=True))
            model.at_least(slowest - here)
            model.at_least(tail - total(f * round(t / unit)
                                        for f, t in zip(row, after, strict=True)))
        blocks = total(f * n for row, d in zip(use, domains, strict=True)
                       for f, n in zip(row, d, strict=True))
        model.equal(blocks, type(blocks)([], self.count))
        model.minimise(total([
            slowest * (self.m * self.v - 1), tail * self.v,
            *(f * (t or 0) for row, seconds in zip(use, finite, strict=True)
              for f, t in zip(row, seconds, strict=True))]))
        result = model.solve(integer=True, parameters="num_workers:1 random_seed:0 "
                             "mip_max_bound:4503599627370496")
        if result.values is None:
            return None
        return [next(n for f, n in zip(row, d, strict=True) if f.value(result.values) > 0.5)
                for row, d in zip(use, domains, strict=True)]

    def _segments(self, numbers: list[int]) -> Segments:
        stages: Segments = [[] for _ in range(self.p * self.v)]
        for i, n in enumerate(numbers):
            for c, r, counts in self.picks[i, n][1]:
                stages[c * self.p + i] += [
                    (r, count, option.choice)
                    for count, option in zip(counts, self.problem.options[r], strict=True)
                    if count]
        return stages


def _figures(cost: LayerCost, more_s: float) -> tuple[float, int, int, int, int]:
    memory = cost.memory
    return (cost.forward_s + cost.backward_s + more_s, memory.static_bytes, memory.activation_bytes,
            memory.working_set_bytes, memory.optimizer_temporary_bytes)


def _step_bytes(groups: list[Group], picks: list[list[int]]) -> int:
    """Bytes of these choices in the optimizer step."""
    return sum(n * (option[1] + option[4])
               for group, counts in zip(groups, picks, strict=True)
               for n, option in zip(counts, group.options, strict=True))
