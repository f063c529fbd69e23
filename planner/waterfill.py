"""How fast the stages can be at best when memory binds, by filling ranks with layers.

One run dominates most models (the blocks of a transformer). For pipeline rank i let

    h_i(n) = least seconds of n layers of that run on rank i within its memory,
             choices mixed in any proportion

which is a fractional knapsack: every layer starts with its fastest choice, and the cheapest seconds
per byte saved are paid until the rank fits. h_i is convex and increasing, so

    least slowest rank   give each next layer to the rank where the result is least
    least sum            give each next layer to the rank where it adds least (ranks up to a limit)

are exact for this relaxation, with whole layers. Other runs count where their place is forced (the
first and last layers of the model) and are left out elsewhere; both make the bound smaller, never
wrong.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from math import inf

from planner.choices import convex_hull
from planner.problem import StageProblem

__all__ = ["Waterfill"]


Hull = list[tuple[float, float]]


class _Rank:
    """h_i for one rank: memory left for the run, time of the forced layers, prices of saving."""

    def __init__(self, room_bytes: float, fixed_s: float, hulls: list[Hull], per_chunk: int,
                 ) -> None:
        """Args:
            room_bytes: for layers of the run. fixed_s: seconds of whatever else the rank does.
            hulls: the choices of a layer in each chunk, the chunk with the least in flight first.
            per_chunk: most layers in one chunk.
        """
        self.room_bytes = room_bytes
        self.fixed_s = fixed_s
        self.per_chunk = per_chunk
        self.hulls = hulls
        self.fastest_s = hulls[0][0][0]
        self.known: dict[int, float] = {}

    def seconds(self, n: int) -> float:
        """h_i(n); inf where even the smallest choices do not fit."""
        if n not in self.known:
            self.known[n] = self._seconds(n)
        return self.known[n]

    def _seconds(self, n: int) -> float:
        time, used, left = self.fixed_s, 0.0, n
        savings: list[tuple[float, float]] = []
        for hull in self.hulls:
            count = min(left, self.per_chunk)
            left -= count
            first_s, first_bytes = hull[0]
            time += count * first_s
            used += count * first_bytes
            for (s, size), (next_s, next_size) in pairwise(hull):
                saved = size - next_size
                savings.append(((next_s - s) / saved, count * saved))
            if not left:
                break
        if left:
            return inf
        over = used - self.room_bytes
        if over <= 0:
            return time
        for price, saved in sorted(savings):
            if saved >= over:
                return time + price * over
            time += price * saved
            over -= saved
        return inf


class Waterfill:
    """The relaxation of one problem."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        runs = problem.runs
        repeated = [r for r, run in enumerate(runs) if run.count > 1]
        # A lone repeated run is what stages have blocks of, whatever else there is.
        main = repeated[0] if len(repeated) == 1 else max(
            range(len(runs)), key=lambda r: runs[r].count * min(
                option.seconds(0) for option in problem.options[r]))
        self.main = main
        self.count = runs[main].count
        p, v = problem.candidate.mesh.pp, problem.candidate.schedule.chunks
        per_chunk = self.count if v == 1 else self.count // (p * v)
        forced: dict[int, list[int]] = {}  # rank -> runs that must lie there
        if p == 1:
            forced[0] = [r for r in range(len(runs)) if r != main]
        else:
            for rank, r in ((0, 0), (p - 1, len(runs) - 1)):
                if r != main:
                    forced.setdefault(rank, []).append(r)
        made: dict[object, _Rank] = {}
        self._hulls: dict[tuple[int, int], Hull] = {}
        self.ranks: list[_Rank] = []
        self.keys: list[object] = []  # equal keys, equal ranks
        for i in range(p):
            weights = sorted(problem.first_moment(i))
            key = (problem.rank_class[i], tuple(weights), tuple(forced.get(i, ())), i in (0, p - 1))
            if key not in made:
                made[key] = self._rank(i, weights, per_chunk, forced.get(i, []))
            self.ranks.append(made[key])
            self.keys.append(key)

    def _rank(self, i: int, weights: list[int], per_chunk: int, forced: list[int]) -> _Rank:
        problem, cls = self.problem, self.problem.rank_class[i]
        p, v = problem.candidate.mesh.pp, problem.candidate.schedule.chunks
        room, fixed = float(problem.capacity_bytes[i]), 0.0
        # A rank without forced layers has some layer, though perhaps none of the main run.
        working = 0 if forced else min(
            option.costs[cls].memory.working_set_bytes
            for options in problem.options for option in options)
        for r in forced:
            costs = [option.costs[cls] for option in problem.options[r]]
            # Of a forced run of several layers at least one lies here; where p = 1, all.
            count = problem.runs[r].count if p == 1 else 1
            fixed += count * min(c.forward_s + c.backward_s for c in costs)
            room -= count * min(c.memory.static_bytes + weights[0] * c.memory.activation_bytes
                                for c in costs)
            working = max(working, min(c.memory.working_set_bytes for c in costs))
        for holders, tie_costs, _ in problem.ties:
            if any(r in holders for r in forced):
                room -= tie_costs[cls].static_bytes
        if p > 1:
            ahead, back = problem.least_receive_s
            fixed += (v - (i == 0)) * ahead + (v - (i == p - 1)) * back
        return _Rank(room - working, fixed, [self._hull(cls, w) for w in weights], per_chunk)

    def _hull(self, cls: int, weight: int) -> Hull:
        """The choices of a layer of the main run where `weight` micro-batches are in flight."""
        if (cls, weight) not in self._hulls:
            costs = [option.costs[cls] for option in self.problem.options[self.main]]
            self._hulls[cls, weight] = convex_hull([
                (c.forward_s + c.backward_s,
                 c.memory.static_bytes + weight * c.memory.activation_bytes) for c in costs])
        return self._hulls[cls, weight]

    def fill(self, least_slowest_s: float) -> tuple[float, list[int]]:
        """(least seconds of the slowest rank, layers of the main run on each rank).

        Infinite if the layers do not fit. `least_slowest_s`: a bound known already, up to which
        ranks are filled at once.
        """
        p, v = len(self.ranks), self.problem.candidate.schedule.chunks
        if p == 1 or v > 1:  # there is one way: equally many blocks for each rank
            each = self.count // p
            seconds = max(rank.seconds(each) for rank in dict.fromkeys(self.ranks))
            return max(least_slowest_s, seconds), [each] * p
        self._found: dict[int, int] = {}
        layers = [self._most(rank, least_slowest_s) for rank in self.ranks]
        slowest, left = least_slowest_s, self.count - sum(layers)
        for i in range(len(layers)):  # too many: the bound was not met; take some back
            if left < 0:
                back = min(layers[i], -left)
                layers[i] -= back
                left += back
        heap = [(rank.seconds(n + 1), i) for i, (rank, n) in
                enumerate(zip(self.ranks, layers, strict=True))]
        heapq.heapify(heap)
        for _ in range(left):
            seconds, i = heap[0]
            if seconds == inf:
                return inf, layers
            slowest = max(slowest, seconds)
            layers[i] += 1
            heapq.heapreplace(heap, (self.ranks[i].seconds(layers[i] + 1), i))
        return slowest, layers

    def _most(self, rank: _Rank, limit_s: float) -> int:
        """Most layers of the run on a rank within a time: from the guess without memory, down or
        up."""
        if id(rank) in self._found:
            return self._found[id(rank)]
        guess, left_s = self.count, max(0.0, limit_s - rank.fixed_s)
        if guess * rank.fastest_s > left_s:  # layers that take no time are not in the way
            guess = int(left_s / rank.fastest_s)
        step = 1
        high = guess + 1
        while guess > 0 and rank.seconds(guess) > limit_s:
            high, guess, step = guess, max(0, guess - step), 2 * step
        while high - guess > 1:
            middle = (guess + high) // 2
            if rank.seconds(middle) <= limit_s:
                guess = middle
            else:
                high = middle
        self._found[id(rank)] = guess
        return guess

    def least_sum(self, limit_s: float) -> float:
        """Least sum of the ranks' seconds when none takes longer than `limit_s`."""
        if self.problem.candidate.schedule.chunks > 1:
            return sum(rank.seconds(self.count // len(self.ranks)) for rank in self.ranks)
        heap = []
        total = 0.0
        for i, rank in enumerate(self.ranks):
            none = rank.seconds(0)
            total += none
            heap.append((rank.seconds(1) - none, i, 0))
        heapq.heapify(heap)
        for _ in range(self.count):
            while heap and (heap[0][0] == inf
                            or self.ranks[heap[0][1]].seconds(heap[0][2] + 1) > limit_s):
                heapq.heappop(heap)  # this rank is full
            if not heap:
                return inf
            adds, i, n = heap[0]
            total += adds
            n += 1
            rank = self.ranks[i]
            heapq.heapreplace(heap, (rank.seconds(n + 1) - rank.seconds(n), i, n))
        return total
