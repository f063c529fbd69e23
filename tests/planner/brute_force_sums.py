"""The least step of one candidate over every cut and every choice, from sums over layers.

A step is worse when any sum of any rank is worse, and ranks have nothing in common but the cut. So
the layers of a rank are added one by one, in every way, and only the sums are kept that no others
equal or beat in all figures; then every cut combines every sum of its ranks. `test_brute_force.py`
holds this against pricing every single layout.
"""

from __future__ import annotations

import functools
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline import operations
from planner.costing import Candidate, CutCost
from planner.layout import Schedule

if TYPE_CHECKING:
    from tests.planner.brute_force import BruteForce

__all__ = ["Sums", "moments", "undominated"]

Ints = NDArray[np.int64]
Stages = tuple[tuple[int, int], ...]
"""(first layer, end) of every stage of a rank."""

TICK_S = 1e-18
"""Seconds are counted in whole ticks, so that equal sums in another order are equal."""


def ticks(seconds: float) -> int:
    return round(seconds / TICK_S)


@functools.cache
def moments(schedule: Schedule, p: int, m: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of each chunk that a rank holds, at the moments that no other equals or beats.
    """
    held = [0] * schedule.chunks
    seen = {}
    for forward, _, chunk in operations(schedule.name, p, schedule.chunks, m, rank):
        held[chunk] += 1 if forward else -1
        seen[tuple(held)] = None
    return tuple(a for a in seen
                 if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True))
                            for b in seen))


def undominated(rows: Ints) -> Ints:
    """The rows that no other equals or beats in every column."""
    rest, kept = np.unique(rows, axis=0), rows[:0]
    while len(rest):
        kept = np.concatenate([kept, rest[:1]])
        rest = rest[(rest < rest[0]).any(axis=1)]
    return kept


class Sums:
    """Least steps of the candidates of one space, remembered where all figures are equal."""

    def __init__(self, space: BruteForce) -> None:
        self.space = space
        self.answers: dict[object, float] = {}

    def least_step(self, candidate: Candidate) -> float:
        """The least step of a candidate; inf if nothing fits."""
        ranks = [_Rank(self.space, candidate, i) for i in range(candidate.mesh.pp)]
        cuts = list(self.space.cuts(candidate))
        key = (candidate.schedule.name, candidate.schedule.chunks, candidate.num_micro_batches,
               tuple(rank.key for rank in ranks), tuple(cuts), self._rest_key(candidate))
        if key not in self.answers:
            self.answers[key] = min((self._of_cut(candidate, ranks, cut) for cut in cuts),
                                    default=inf)
        return self.answers[key]

    def _rest_key(self, candidate: Candidate) -> object:
        coster = self.space.coster
        return (coster.norm_latency_s(candidate.mesh), *(
            coster.tie_reduction_s(g, candidate) for g in range(len(self.space.graph.ties))
            if candidate.mesh.pp > 1))

    def _of_cut(self, candidate: Candidate, ranks: list[_Rank], ends: tuple[int, ...]) -> float:
        p, v, m = candidate.mesh.pp, candidate.schedule.chunks, candidate.num_micro_batches
        bounds = [0, *ends, self.space.num_layers]
        # Columns: slowest rank (GPipe: forward, backward), sum of all ranks, longest tail.
        done = np.zeros((1, ranks[0].num_times + 2), dtype=np.int64)
        holders = [0] * len(self.space.graph.ties)
        for rank in ranks:
            stages = tuple((bounds[k], bounds[k + 1]) for k in range(rank.index, p * v, p))
            for group in rank.ties_of(stages):
                holders[group] += 1
            sums = rank.sums(stages)
            if not len(sums):
                return inf
            done = undominated(np.concatenate([
                np.maximum(done[:, None, :-2], sums[None, :, :-1]),
                done[:, None, -2:-1] + sums[None, :, :-1].sum(axis=2, keepdims=True),
                np.maximum(done[:, None, -1:], sums[None, :, -1:])], axis=2).reshape(
                    -1, done.shape[1]))
        coster = self.space.coster
        rest = coster.norm_latency_s(candidate.mesh) + sum(
            (held - 1) * coster.tie_reduction_s(group, candidate)
            for group, held in enumerate(holders) if held > 1)
        steps = (m - 1 / v) * done[:, :-2].sum(axis=1) + done[:, -2] / v + done[:, -1]
        return float(steps.min()) * TICK_S + rest


class _Rank:
    """The sums over the layers of one pipeline rank, for any stages that it may have.

    Columns that add up: seconds (GPipe: forward, backward); tails, what follows the last backward;
    bytes at each moment of the schedule; bytes in the optimizer step, unless it is fused. The last
    column is the working set, of which the largest counts.

    A lone rank has no seconds of its own: its tails carry those of all micro-batches. The tail is
    the larger of two sums where the last reduction overlaps.
    """

    def __init__(self, space: BruteForce, candidate: Candidate, index: int) -> None:
        coster, mesh, schedule = space.coster, candidate.mesh, candidate.schedule
        contexts, class_of = coster.contexts(mesh)
        self.space, self.candidate, self.index = space, candidate, index
        self.context = contexts[class_of[index]]
        self.room = self.context.capacity_bytes - self.context.overhead_bytes
        self.moments = moments(schedule, mesh.pp, candidate.num_micro_batches, index)
        self.overlaps = coster.overlaps(mesh)
        self.fused = space.request.fused_optimizer
        self.num_times = 0 if mesh.pp == 1 else 2 if schedule.name == "gpipe" else 1
        self.num_tails = 2 if self.overlaps else 1
        self.tables = [[self._table(layer, chunk) for layer in range(space.num_layers)]
                       for chunk in range(schedule.chunks)]
        self.ties = [self._tie(group) for group in range(len(space.graph.ties))]
        self.cuts = [self._cut(end) for end in range(1, space.num_layers)]
        self.known: dict[Stages, Ints] = {}

    @property
    def key(self) -> object:
        """Ranks with equal keys have equal sums."""
        return (self.room, self.moments, self.overlaps, self.fused, tuple(self.cuts),
                tuple(row.tobytes() for row in self.ties),
                tuple(table.tobytes() for tables in self.tables for table in tables))

    # --- figures

    def _times(self, forward_s: float, backward_s: float) -> list[int]:
        """In ticks, as are the tails."""
        columns = [[], [forward_s + backward_s], [forward_s, backward_s]][self.num_times]
        return [ticks(seconds) for seconds in columns]

    def _tails(self, once_s: float, reduce_s: float, window_s: float) -> list[int]:
        """max((g-1) R, R - (2-g) W) as two sums; without overlap R alone."""
        g = self.context.group.overlap_slowdown
        forms = ([(g - 1) * reduce_s, reduce_s - (2 - g) * window_s] if self.overlaps
                 else [reduce_s])
        return [ticks(once_s + form) for form in forms]

    def _bytes(self, static: int, activations: tuple[int, ...], temporary: int) -> list[int]:
        step = [] if self.fused else [static + temporary]
        return [*(static + held for held in activations), *step]

    def _table(self, layer: int, chunk: int) -> Ints:
        """A row for every choice of a layer in a chunk."""
        rows = []
        for choice in self.space.choices(layer, self.candidate):
            cost = self.space.coster.layer(self.space.layers[layer], choice, self.candidate,
                                           self.context)
            once, memory = cost.parameters, cost.memory
            once_s = once.optimizer_s + once.norm_s
            if self.num_times == 0:
                once_s += self.candidate.num_micro_batches * (cost.forward_s + cost.backward_s)
            rows.append([
                *self._times(cost.forward_s, cost.backward_s),
                *self._tails(once_s, once.reduce_s, cost.window_s),
                *self._bytes(memory.static_bytes, tuple(
                    held[chunk] * memory.activation_bytes for held in self.moments),
                    memory.optimizer_temporary_bytes),
                memory.working_set_bytes])
        return undominated(np.array(rows, dtype=np.int64))

    def _tie(self, group: int) -> Ints:
        """What a tied parameter adds."""
        cost = self.space.coster.tie(group, self.candidate, self.context)
        once = cost.parameters
        tails = self._tails(once.gather_s + once.reduce_each_s + once.optimizer_s + once.norm_s,
                            once.reduce_s, 0.0)
        return np.array([
            *[0] * self.num_times, *tails,
            *self._bytes(cost.static_bytes, (0,) * len(self.moments), cost.temporary_bytes), 0],
            dtype=np.int64)

    def _cut(self, end: int) -> tuple[CutCost, CutCost]:
        """What a cut before layer `end` costs, received by this rank and sent by it."""
        p, chunks = self.candidate.mesh.pp, self.candidate.schedule.chunks
        receives = self.index > 0 or chunks > 1
        sends = self.index < p - 1 or chunks > 1
        before = (self.index - 1) % p
        return (self.space.cut(end, self.candidate, before) if receives and p > 1 else CutCost(),
                self.space.cut(end, self.candidate, self.index) if sends and p > 1 else CutCost())

    def ties_of(self, stages: Stages) -> list[int]:
        """The tied parameters that this rank holds with these stages."""
        mine = {layer for start, end in stages for layer in range(start, end)}
        return [group for group, tie in enumerate(self.space.graph.ties)
                if mine & {layer for layer, _ in tie.places}]

    # --- sums

    def sums(self, stages: Stages) -> Ints:
        """(seconds, tail) of every way to do these stages that fits."""
        rows = self._layers(stages)
        moment_columns = slice(self.num_times + self.num_tails,
                               self.num_times + self.num_tails + len(self.moments))
        fixed = np.zeros(rows.shape[1], dtype=np.int64)
        for chunk, (start, end) in enumerate(stages):
            forward_s = self.cuts[start - 1][0].forward_s if start > 0 else 0.0
            sent = self.cuts[end - 1][1] if end < self.space.num_layers else CutCost()
            fixed[:self.num_times] += np.array(self._times(forward_s, sent.backward_s), dtype=int)
            fixed[moment_columns] += [held[chunk] * sent.held_bytes for held in self.moments]
        for group in self.ties_of(stages):
            fixed += self.ties[group]
        rows = self._fitting(rows + fixed)
        tails = rows[:, self.num_times:self.num_times + self.num_tails].max(axis=1)
        return undominated(np.column_stack([rows[:, :self.num_times], tails]))

    def _fitting(self, rows: Ints) -> Ints:
        first = self.num_times + self.num_tails
        peaks = rows[:, first:first + len(self.moments)] + rows[:, -1:]
        fits = (peaks <= self.room).all(axis=1)
        return rows[fits if self.fused else fits & (rows[:, -2] <= self.room)]

    def _layers(self, stages: Stages) -> Ints:
        """The sums over layers alone, from those over one layer less."""
        if stages not in self.known:
            (*others, (start, end)) = stages
            if start < end:
                before = self._layers((*others, (start, end - 1)))
                table = self.tables[len(others)][end - 1]
                rows = before[:, None, :] + table[None]
                rows[:, :, -1] = np.maximum(before[:, None, -1], table[None, :, -1])
                self.known[stages] = undominated(
                    self._fitting(rows.reshape(-1, table.shape[1])))
            else:
                self.known[stages] = self._layers(tuple(others)) if others else np.zeros(
                    (1, self.tables[0][0].shape[1]), dtype=np.int64)
        return self.known[stages]
