"""Whether a candidate can fit at all, every layer as small as any of its choices makes it.

A quick look before the options of a candidate are made: most candidates that do not fit are off by
far. Symbols: p ranks, v chunks, w_i micro-batches in flight on rank i, a_r and z_r the least
activation and static bytes of a layer of run r, and what the first and the last rank must hold set
aside.

    one rank (p = 1)     sum n_r (z_r + a_r)
    interleaved          each rank has N/p of the N blocks, its chunks their share of w_i
    else                 rank i has room for floor(room_i / (z + w_i a)) blocks: together N
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.chain import Run
from planner.cost.pipeline import first_moment
from planner.costing import Candidate, Coster
from planner.problem import choices_for

__all__ = ["may_fit"]


@dataclass(frozen=True, slots=True)
class _Least:
    """The least bytes of a layer, each over all of its choices."""

    static_bytes: int
    activation_bytes: int
    working_set_bytes: int


def _least(coster: Coster, run: Run, candidate: Candidate) -> _Least:
    tp, mb = candidate.mesh.tp, candidate.micro_batch
    choices = choices_for(coster, run, candidate)
    lean = [choice for choice in choices if choice.reshard] or choices
    one_mode = [choice for choice in lean if choice.recompute == lean[0].recompute]
    work = [coster.activations(run, choice, mb, tp) for choice in lean]
    return _Least(
        min(coster.memory(run, choice, candidate).static_bytes for choice in one_mode),
        min(w.saved_bytes for w in work), min(w.working_set_bytes for w in work))


def may_fit(coster: Coster, candidate: Candidate) -> bool:
    """False only where no stages and choices of the candidate fit."""
    mesh, schedule = candidate.mesh, candidate.schedule
    runs, main = coster.chain.runs, coster.chain.block_run
    contexts, rank_class = coster.contexts(mesh)
    room = [contexts[c].capacity_bytes - contexts[c].overhead_bytes for c in rank_class]
    least = [_least(coster, run, candidate) for run in runs]
    if mesh.pp == 1:
        held = sum(run.count * (one.static_bytes + one.activation_bytes)
                   for run, one in zip(runs, least, strict=True))
        return held + max(one.working_set_bytes for one in least) <= room[0]
    if main is None:
        return True
    weights = [first_moment(schedule.name, mesh.pp, schedule.chunks, candidate.num_micro_batches,
                            rank) for rank in range(mesh.pp)]
    for rank, r in ((0, 0), (mesh.pp - 1, len(runs) - 1)):
        if r != main:  # forced: it lies there whatever else does
            one = least[r]
            room[rank] -= (one.static_bytes + min(weights[rank]) * one.activation_bytes
                           + one.working_set_bytes)
    if min(room) < 0:
        return False
    block, count = least[main], runs[main].count
    if schedule.chunks > 1:
        each = count // (mesh.pp * schedule.chunks)
        return all(each * (schedule.chunks * block.static_bytes
                           + sum(moment) * block.activation_bytes) <= left
                   for moment, left in zip(weights, room, strict=True))
    sizes = [block.static_bytes + moment[0] * block.activation_bytes for moment in weights]
    if 0 in sizes:
        return True
    return sum(left // size for left, size in zip(room, sizes, strict=True)) >= count
