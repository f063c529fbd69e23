"""Pipeline schedules: closed forms, micro-batches in flight, and an exact replay.

Symbols: p = pipeline ranks, v = chunks per rank (stages k = 0..p*v-1, stage k on rank k mod p), m =
micro-batches, f_k / b_k = seconds of stage k forward / backward for one micro-batch, receiving
included; t_r = seconds of all chunks of rank r.

    1F1B         (m - 1) max_r t_r + sum_r t_r
    GPipe        (m - 1) (max_r f_r + max_r b_r) + sum_r t_r
    interleaved  (m - 1/v) max_r t_r + (sum_r t_r) / v        the bubble shrinks by v

(Narayanan et al., SC21, section 2.2.) All three are exact for equal stages, GPipe's for any; that
of 1F1B is never too fast where backward takes as many times as long as forward on every stage, else
it can be (by up to a fifth). The replay orders the operations of each rank as the schedule does,
and lets each start when its rank is free and its input has come.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.capabilities import ScheduleName

__all__ = ["Operation", "TimelineEvent", "first_moment", "in_flight", "operations",
           "pipeline_seconds", "replay"]

Operation = tuple[bool, int, int]
"""(is forward, micro-batch, chunk)."""


def pipeline_seconds(schedule: ScheduleName, chunks: int, num_micro_batches: int,
                     forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
    """Closed form; `forward_s` and `backward_s` are per pipeline rank, all of its chunks."""
    total = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    if schedule == "gpipe":
        slowest = max(forward_s) + max(backward_s)
    else:
        slowest = max(total)
    return (num_micro_batches - 1 / chunks) * slowest + sum(total) / chunks


def _forward_chunk(index: int, p: int, v: int) -> int:
    return index // p % v


def operations(schedule: ScheduleName, p: int, v: int, m: int, rank: int) -> list[Operation]:
    """The operations of one rank in the order in which it runs them."""
    if schedule == "gpipe":
        return [(True, i, 0) for i in range(m)] + [(False, i, 0) for i in range(m)]
    total = m * v
    warm_up = min(total, _warm_up(p, v, rank))
    order: list[Operation] = []
    for step in range(warm_up + total):
        if step < total:
            order.append(_operation(True, step, p, v))
        if step >= warm_up:
            order.append(_operation(False, step - warm_up, p, v))
    return order


def _warm_up(p: int, v: int, rank: int) -> int:
    """Forwards that a rank runs before it alternates (Megatron-LM's and torch's rule)."""
    return p - 1 - rank if v == 1 else 2 * (p - 1 - rank) + (v - 1) * p


def _operation(forward: bool, index: int, p: int, v: int) -> Operation:
    chunk = _forward_chunk(index, p, v)
    micro_batch = index // (p * v) * p + index % p if v > 1 else index
    return forward, micro_batch, chunk if forward else v - 1 - chunk


@functools.lru_cache(maxsize=65_536)
def in_flight(schedule: ScheduleName, p: int, v: int, m: int, rank: int
              ) -> tuple[tuple[int, ...], ...]:
    """Micro-batches whose activations a rank holds, per chunk, at each moment that can be the peak.

    Each vector (n_0, ..., n_{v-1}) is a moment; dominated moments are left out. For 1F1B there
    is one, (min(m, p - rank),); GPipe holds all m.
    """
    if schedule == "gpipe":
        return ((m,),)
    if v == 1:
        return ((min(m, p - rank),),)
    # The pattern repeats every p*v forwards; one period after the warm-up shows every moment.
    forwards = np.arange(1, min(m * v, _warm_up(p, v, rank) + p * v + 1) + 1)
    held = _first_of_chunk(forwards, p, v)
    held -= _first_of_chunk(np.maximum(forwards - 1 - _warm_up(p, v, rank), 0), p, v)[:, ::-1]
    moments = np.array(sorted(set(map(tuple, held.tolist()))))
    below = (moments[:, None] <= moments[None]).all(axis=2)
    dominated = below.sum(axis=1) > 1  # by another than itself
    return tuple(tuple(int(n) for n in row) for row in moments[~dominated])


def _first_of_chunk(operations_done: NDArray[np.int64], p: int, v: int) -> NDArray[np.int64]:
    """How many of the first n operations are of each chunk, shape (len(n), v): they come in
    groups of p per chunk."""
    rounds, rest = np.divmod(operations_done, p * v)
    chunk = np.arange(v) * p
    return rounds[:, None] * p + np.clip(rest[:, None] - chunk, 0, p)


def first_moment(schedule: ScheduleName, p: int, v: int, m: int, rank: int) -> tuple[int, ...]:
    """The micro-batches in flight, per chunk, when the warm-up ends: one of `in_flight`'s
    moments."""
    if v == 1:
        return in_flight(schedule, p, v, m, rank)[0]
    rounds, rest = divmod(min(m * v, _warm_up(p, v, rank) + 1), p * v)
    return tuple(rounds * p + min(max(rest - c * p, 0), p) for c in range(v))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """One operation of the replay."""

    rank: int
    forward: bool
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float


def replay(schedule: ScheduleName, p: int, v: int, m: int, forward_s: Sequence[float],
           backward_s: Sequence[float], timeline: list[TimelineEvent] | None = None) -> float:
    """Seconds from the first forward to the last backward, event by event.

    Args:
        forward_s, backward_s: per stage k = 0..p*v-1.
        timeline: filled with every operation, if given.
    """
    queues = [operations(schedule, p, v, m, rank) for rank in range(p)]
    position, free = [0] * p, [0.0] * p
    done: dict[tuple[bool, int, int], float] = {}
    last_stage = p * v - 1
    ready = list(range(p))
    while ready:
        rank = ready.pop()
        while position[rank] < len(queues[rank]):
            forward, micro_batch, chunk = queues[rank][position[rank]]
            stage = chunk * p + rank
            if forward:
                needs = (True, micro_batch, stage - 1) if stage else None
            else:
                needs = ((False, micro_batch, stage + 1) if stage < last_stage
                         else (True, micro_batch, stage))
            if needs is not None and needs not in done:
                break
            start = max(free[rank], done[needs] if needs is not None else 0.0)
            end = start + (forward_s if forward else backward_s)[stage]
            done[forward, micro_batch, stage] = free[rank] = end
            position[rank] += 1
            if timeline is not None:
                timeline.append(TimelineEvent(rank=rank, forward=forward, chunk=chunk,
                                              micro_batch=micro_batch, start_s=start, end_s=end))
            neighbour = (rank + 1 if forward else rank - 1) % p
            if neighbour != rank and neighbour not in ready:
                ready.append(neighbour)
    if any(position[rank] < len(queues[rank]) for rank in range(p)):
        raise RuntimeError(f"{schedule} with p={p}, v={v}, m={m} deadlocks")  # our own bug
    return max(free)
