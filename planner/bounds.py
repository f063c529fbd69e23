"""Lower bounds of the step time, valid for every layout of a row or of a candidate.

Symbols as in `planner/pricing.py`; w_r = least seconds of a layer of run r for one micro-batch over
all of its choices, n_r = its layers, S = sum n_r w_r.

    slowest >= max(S / p, max_r ceil(n_r / p) w_r)           one rank has at least its share
    slowest >= the best cut of the chain into p pieces       where a rank has one piece (v = 1)
    sum t   >= S + receiving
    tail    >= (once-a-step work of all layers) / p
    step    >= (m - 1/v) slowest + (sum t) / v + tail + rest

Memory: where the least that all layers can hold exceeds what all ranks have, there is no layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer import (
    norm_bytes,
    tensor_parallel_seconds,
    update_bytes,
    working_seconds,
)
from planner.costing import Candidate, Coster, RankContext
from planner.greedy import balanced_cut
from planner.layout import Choice, Mesh, Schedule
from planner.problem import choices_for, least_receive
from planner.space import Row
from planner.topology_groups import Span

__all__ = ["SLACK", "CandidateBounds", "MeshBounds", "ideal_span", "row_bounds"]

Floats = NDArray[np.float64]
SLACK = 1.0 - 1e-9
"""Bounds are sums in another order than the prices: keep them below by more than rounding."""


def ideal_span(coster: Coster, size: int) -> Span:
    """Better than any span of this size in the topology: fewest hosts, the best links, unshared.

    Between devices of a host it has the better of both kinds of link, since members on hosts of
    their own do without the slower one.
    """
    hosts = coster.topology.hosts
    per_host = max(g.devices_per_host for g in hosts)
    num_hosts = ceil(size / per_host)
    members = size // num_hosts
    between = max(g.network_card.effective_bytes_per_s * g.cards_per_host for g in hosts)
    inside = max(g.device_link.effective_bytes_per_s for g in hosts)
    return Span(
        size=size, num_groups=1, num_hosts=num_hosts, members_per_host=members,
        max_members_per_host=members, groups_per_host=1,
        device_bytes_per_s=inside if coster.topology.num_hosts == 1 else max(inside, between),
        device_latency_s=0.0,
        card_bytes_per_s=inf if num_hosts == 1 else between,
        card_latency_s=0.0,
        fits=coster.links.ideal(size) if coster.links is not None and size > 1 else None)


@dataclass(slots=True)
class _Least:
    """The least of each run's layer at one (tp, micro-batch): arrays over runs."""

    seconds: Floats
    activation_bytes: Floats
    trainable: Floats
    frozen: Floats


def _least(coster: Coster, tp: int, micro_batch: int, span: Span) -> _Least:
    """Over all choices, and over the device kinds, with tensor-parallel collectives on `span`."""
    candidate = Candidate(mesh=Mesh(tp=tp), micro_batch=micro_batch, num_micro_batches=1,
                          schedule=Schedule())
    result = []
    for run in coster.chain.runs:
        rows = []
        choices = choices_for(coster, run, candidate)
        quick = _without_recompute(choices)
        for choice in choices:
            saved = coster.activations(run, choice, micro_batch, tp).saved_bytes
            if choice not in quick:
                rows.append((inf, saved, inf, inf))
                continue
            shard = coster.shard(micro_batch, tp, choice)
            collectives = tensor_parallel_seconds(coster.graph.kinds[run.kind], choice, shard,
                                                  span, run.input)
            working = inf
            for group in range(len(coster.topology.hosts)):
                times = coster.compute(run.kind, shard, (group,))
                working = min(working, sum(working_seconds(choice, times, collectives)))
            rows.append((working + collectives[0] + collectives[1], saved,
                         *coster.local_parameters(run, shard.tp)))
        result.append([min(column) for column in zip(*rows, strict=True)])
    return _Least(*np.array(result, dtype=float).T)


def _without_recompute(choices: list[Choice]) -> list[Choice]:
    """Those that recompute nothing, which are never slower; all, where it is demanded."""
    return [choice for choice in choices if choice.recompute == "none"] or choices


def row_bounds(coster: Coster, table: dict[str, NDArray[np.int64]]) -> Floats:
    """Lower bound of each row of level 1; inf where memory cannot suffice."""
    bounds = np.empty(len(table["tp"]))
    pairs = np.stack([table["tp"], table["micro_batch"]])
    unique, inverse = np.unique(pairs, axis=1, return_inverse=True)
    order = np.argsort(inverse.ravel(), kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(inverse.ravel()))[:-1])
    counts = np.array([run.count for run in coster.chain.runs], dtype=float)
    for (tp, micro_batch), index in zip(unique.T, groups, strict=True):
        least = _least(coster, int(tp), int(micro_batch), ideal_span(coster, int(tp)))
        bounds[index] = _bound(coster, least, counts, int(tp),
                               *(table[name][index].astype(float)
                                 for name in ("pp", "dp", "num_micro_batches")))
    return bounds * SLACK


def _bound(coster: Coster, least: _Least, counts: Floats, tp: int, pp: Floats, dp: Floats,
           m: Floats) -> Floats:
    request = coster.request
    size, moments = request.bytes, request.num_moments
    devices = [group.device for group in coster.topology.hosts]
    total = float(counts @ least.seconds)
    shares = np.ceil(counts[:, None] / pp) * least.seconds[:, None]
    slowest = np.maximum(total / pp, shares.max(axis=0))
    most, inverse = np.unique(pp, return_inverse=True)
    chunks = np.array([max([1, *coster.chain.chunks(int(p))]) for p in most])[inverse]
    if coster.capabilities.interleaved_micro_batches == "multiple_of_pp":
        chunks = np.where(m % pp == 0, chunks, 1)
    chunks = np.where(pp > 1, chunks, 1)
    trainable, frozen = float(counts @ least.trainable), float(counts @ least.frozen)
    ranks = pp * dp
    update_s, norm_s = (num_bytes / max(coster.stream_bytes_per_s(group)[part]
                                        for group in range(len(devices)))
                        for part, num_bytes in enumerate((update_bytes(request),
                                                          norm_bytes(request))))
    tail = trainable * (update_s + norm_s) / ranks
    bound = (m - 1 / chunks) * slowest + total / chunks + tail
    # Least memory of all pipeline ranks together: states sharded over all of dp, one micro-batch
    # held; with stages whole gradients, unless the target can reduce each micro-batch.
    whole = (pp > 1) & (dp > 1) & (
        not coster.capabilities.gradient_sync_per_micro_batch_with_pipeline)
    state = (trainable * (size.stored_bytes + moments * size.state_bytes)
             + frozen * size.compute_bytes) / dp
    # Where nothing is sharded gradients are whole as well, so the smaller of both is a bound.
    gradient = trainable * np.where(whole, min(size.reduce_bytes, size.gradient_bytes),
                                    size.gradient_bytes / dp)
    needed = state + gradient + float(counts @ least.activation_bytes)
    available = pp * max((1 - request.memory_margin) * d.memory_bytes
                         - coster.device_context_bytes(group) for group, d in enumerate(devices))
    return np.where(needed > available, inf, bound)


@dataclass(slots=True)
class _Table:
    """The least of each run over its choices: arrays over runs; of the window, the most."""

    seconds: Floats
    once: Floats
    reduce: Floats
    window: Floats
    slowdown: float


class MeshBounds:
    """Bounds of a row on one mesh: tensor-parallel collectives and reductions where they lie."""

    def __init__(self, coster: Coster) -> None:
        self.coster = coster
        self.counts = np.array([run.count for run in coster.chain.runs], dtype=float)
        self._seconds: dict[object, Floats] = {}
        self._tails: dict[object, float] = {}

    def bound(self, row: Row, mesh: Mesh) -> float:
        """Bound of every candidate of a row on a mesh."""
        contexts, _ = self.coster.contexts(mesh)
        seconds = self._layer_seconds(row, contexts)
        p, m = row.pp, row.num_micro_batches
        total = float(self.counts @ seconds)
        slowest = max(total / p, float((np.ceil(self.counts / p) * seconds).max()))
        chunks = max([1, *self.coster.chain.chunks(p)]) if p > 1 else 1
        # With stages, gradients may have been reduced after each micro-batch.
        hides = (self.coster.overlaps(mesh)
                 or self.coster.capabilities.gradient_sync_per_micro_batch_with_pipeline)
        tail = min(self._tail(context, row.tp, hides) for context in contexts) / p
        return ((m - 1 / chunks) * slowest + total / chunks + tail) * SLACK

    def _layer_seconds(self, row: Row, contexts: tuple[RankContext, ...]) -> Floats:
        key = (row.tp, row.micro_batch, tuple(dict.fromkeys(c.group.tp for c in contexts)))
        if key not in self._seconds:
            self._seconds[key] = np.min([
                _least(self.coster, row.tp, row.micro_batch, span).seconds for span in key[2]],
                axis=0)
        return self._seconds[key]

    def _tail(self, context: RankContext, tp: int, hides: bool) -> float:
        """Once-a-step seconds of all layers together; a reduction that may hide is left out."""
        key = (context, tp, hides)
        if key not in self._tails:
            total = 0.0
            for run, count in zip(self.coster.chain.runs, self.counts, strict=True):
                costs = [self.coster.parameters(run, choice, tp, context, each_micro_batch=False)
                         for choice in (Choice(), Choice(tensor_parallel=False))]
                total += float(count) * min(
                    c.optimizer_s + c.norm_s + (0.0 if hides else c.reduce_s) for c in costs)
            self._tails[key] = total
        return self._tails[key]


class CandidateBounds:
    """Bounds of candidates from the exact seconds of their layers, memory left out."""

    def __init__(self, coster: Coster) -> None:
        self.coster = coster
        self.counts = np.array([run.count for run in coster.chain.runs], dtype=float)
        self._tables: dict[object, _Table] = {}
        self._bottlenecks: dict[tuple[tuple[float, ...], int], float] = {}

    def _table(self, candidate: Candidate) -> _Table:
        """Kept parameters are never slower than resharded ones, so only those are looked at.

        Recompute is never faster, but can lengthen the window that a lone rank's reduction has.
        """
        coster, mesh = self.coster, candidate.mesh
        contexts, _ = coster.contexts(mesh)
        times = coster.times_of(candidate)
        has_window = mesh.pp == 1 and coster.overlaps(mesh)
        key = (contexts, mesh.tp, candidate.micro_batch, times, candidate.each_micro_batch,
               has_window)
        if key not in self._tables:
            columns = []
            for run in coster.chain.runs:
                choices = choices_for(coster, run, candidate)
                kept = [choice for choice in choices if not choice.reshard] or choices
                kept = kept if has_window else _without_recompute(kept)
                seconds, once, reduce, window = [], [], [], []
                for choice in kept:
                    for context in contexts:
                        cost, parameters = coster.seconds(run, choice, candidate, context)
                        seconds.append(cost.forward_s + cost.backward_s)
                        window.append(cost.window_s)
                        once.append(parameters.optimizer_s + parameters.norm_s)
                        reduce.append(parameters.reduce_s)
                columns.append((min(seconds), min(once), min(reduce), max(window)))
            least_s, once_s, reduce_s, window_s = np.array(columns).T
            self._tables[key] = _Table(
                seconds=least_s, once=once_s, reduce=reduce_s, window=window_s,
                slowdown=min(c.group.overlap_slowdown for c in contexts))
        return self._tables[key]

    def _least_bottleneck(self, table: _Table, p: int) -> float:
        key = (tuple(table.seconds.tolist()), p)
        if key not in self._bottlenecks:
            weights = np.repeat(table.seconds, [run.count for run in self.coster.chain.runs])
            self._bottlenecks[key] = balanced_cut(weights.tolist(), p)[0]
        return self._bottlenecks[key]

    def bound(self, candidate: Candidate) -> tuple[float, float]:
        """(bound of the step, bound of the slowest rank's seconds) of a candidate."""
        p, v = candidate.mesh.pp, candidate.schedule.chunks
        table = self._table(candidate)
        slowest = max(float(self.counts @ table.seconds) / p,
                      float((np.ceil(self.counts / p) * table.seconds).max()))
        if v == 1 and p > 1:
            slowest = max(slowest, self._least_bottleneck(table, p))
        if p > 1:
            ahead, back = least_receive(self.coster, candidate)
            # Each rank has v pieces; the first receives no activations once, the last no gradients.
            slowest += (v - 1) * (ahead + back) + min(ahead, back)
        return self.step(candidate, slowest, 0.0), slowest * SLACK

    def step(self, candidate: Candidate, slowest_s: float, total_s: float) -> float:
        """Bound of the step from bounds of the slowest rank and of the sum over ranks."""
        p, v, m = candidate.mesh.pp, candidate.schedule.chunks, candidate.num_micro_batches
        table, counts = self._table(candidate), self.counts
        total = float(counts @ table.seconds)
        if p > 1:
            total += (p * v - 1) * sum(least_receive(self.coster, candidate))
        once, reduce = float(counts @ table.once), float(counts @ table.reduce)
        if not self.coster.overlaps(candidate.mesh):
            tail = (once + reduce) / p
        elif p > 1:
            tail = (once + (table.slowdown - 1.0) * reduce) / p
        else:
            hidden = (2.0 - table.slowdown) * float(counts @ table.window)
            tail = once + max((table.slowdown - 1.0) * reduce, reduce - hidden)
        rest = self.coster.norm_latency_s(candidate.mesh)
        return ((m - 1 / v) * slowest_s + max(total, total_s) / v + tail + rest) * SLACK
