"""Why nothing fits, and what would: the diagnosis of an infeasible request.

The layout that comes nearest (least bytes over on its worst rank) is named with its terms. Then one
thing at a time is changed, and the changes under which a layout is found that fits are listed,
among them the smallest number of devices. Every claim "fits" rests on a priced layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from planner.costing import Candidate, Coster
from planner.greedy import balanced_cut
from planner.layout import Choice, Mesh, Schedule
from planner.pricing import Evaluation, evaluate
from planner.problem import Option, StageProblem, make_problem
from planner.request import Request
from planner.space import rows
from planner.topology import MAX_DEVICES, Topology
from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph

__all__ = ["Diagnosis", "diagnose"]

MOST_TRIED = 400
"""Meshes priced for one diagnosis; those with the most devices first."""

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What overflows in the nearest layout, and the nearest changes that fit."""

    layout: str
    stage: int
    device: str
    needed_bytes: int
    available_bytes: int
    terms: dict[str, int]
    suggestions: tuple[str, ...]

    def lines(self) -> list[str]:
        """The diagnosis for a person."""
        over = self.needed_bytes - self.available_bytes
        terms = sorted(self.terms.items(), key=lambda item: -item[1])
        return [
            f"the nearest layout is {self.layout}",
            f"its pipeline rank {self.stage} needs {self.needed_bytes / GIB:.2f} GiB on each "
            f"{self.device}, {self.available_bytes / GIB:.2f} GiB are available: "
            f"{over / GIB:.2f} GiB too much",
            "largest terms: " + ", ".join(
                f"{name.replace('_', ' ')} {size / GIB:.2f} GiB" for name, size in terms[:5]),
            *([f"it fits with {text}" for text in self.suggestions] or
              ["no single change that was tried makes it fit"]),
        ]


@dataclass(frozen=True, slots=True)
class _Near:
    over_bytes: int
    candidate: Candidate
    evaluation: Evaluation


def diagnose(graph: LayerGraph, topology: Topology, request: Request) -> Diagnosis:
    """Diagnose a request for which the search found nothing."""
    near = _nearest(Coster(graph, topology, request))
    if near is None:
        raise InvalidInput(f"no legal layout of {graph.name} on {topology.name}")
    over = near.evaluation.overflow_bytes()
    rank = over.index(max(over))
    terms = near.evaluation.memory[rank]
    context = near.evaluation.ranks[rank].context
    mesh = near.candidate.mesh
    degrees = " x ".join(f"{axis} {mesh.degree(axis)}" for axis in
                         ("pp", "dp_replicate", "dp_shard", "tp") if mesh.degree(axis) > 1)
    return Diagnosis(
        layout=f"{degrees or 'one device'}, micro-batch {near.candidate.micro_batch}",
        stage=rank, terms=terms, needed_bytes=sum(terms.values()),
        device=topology.hosts[context.device_groups[0]].device.name,
        available_bytes=context.capacity_bytes,
        suggestions=tuple(_suggestions(graph, topology, request)))


def _fits(graph: LayerGraph, topology: Topology, request: Request) -> bool:
    try:
        near = _nearest(Coster(graph, topology, request))
    except InvalidInput:
        return False
    return near is not None and near.over_bytes <= 0


def _nearest(coster: Coster) -> _Near | None:
    """The layout with the least overflow among many meshes, each at its most frugal."""
    best: _Near | None = None
    for candidate in _frugal_candidates(coster):
        problem = make_problem(coster, candidate)
        for stages in _frugal_stages(problem):
            evaluation = evaluate(coster, candidate, stages)
            over = max(evaluation.overflow_bytes())
            if best is None or over < best.over_bytes:
                best = _Near(over, candidate, evaluation)
            if over <= 0:
                return best
    return best


def _frugal_candidates(coster: Coster) -> Iterator[Candidate]:
    """For each (tp, pp, dp) the smallest micro-batch and everything sharded."""
    table = rows(coster)
    columns = [table[name].tolist() for name in ("tp", "pp", "dp", "micro_batch",
                                                 "num_micro_batches")]
    smallest: dict[tuple[int, int, int], tuple[int, int]] = {}
    for tp, pp, dp, b, m in zip(*columns, strict=True):
        key = (tp, pp, dp)
        if key not in smallest or b < smallest[key][0]:
            smallest[key] = (b, m)
    order = sorted(smallest, key=lambda k: (-k[0] * k[1] * k[2], k[1], k[0]))
    request = coster.request
    for tp, pp, dp in order[:MOST_TRIED]:
        b, m = smallest[tp, pp, dp]
        shard = request.dp_shard or dp // (request.dp_replicate or 1)
        each = pp == 1 and shard > 1 and m > 1
        yield Candidate(
            mesh=Mesh(pp=pp, dp_replicate=dp // shard, dp_shard=shard, tp=tp),
            micro_batch=b, num_micro_batches=m,
            schedule=Schedule(name="1f1b" if m >= pp else "gpipe",
                              gradient_sync="each_micro_batch" if each else "last_micro_batch"))


def _frugal_stages(problem: StageProblem) -> Iterator[list[list[tuple[int, int, Choice]]]]:
    """Stages balanced by memory, under each policy that could need the least."""
    choices = dict.fromkeys(o.choice for options in problem.options for o in options)
    for wanted in choices:
        chosen = [_nearest_option(options, wanted) for options in problem.options]
        first = problem.first_moment(0)[0]
        weights = [float(o.costs[0].memory.static_bytes
                         + first * o.costs[0].memory.activation_bytes + 1)
                   for run, o in zip(problem.runs, chosen, strict=True) for _ in range(run.count)]
        cuts = balanced_cut(weights, problem.num_stages)[1]
        yield [[(r, n, chosen[r].choice) for r, run in enumerate(problem.runs)
                if (n := min(end, run.first + run.count) - max(start, run.first)) > 0]
               for start, end in zip([0, *cuts], cuts, strict=False)]


def _nearest_option(options: tuple[Option, ...], wanted: Choice) -> Option:
    return min(options, key=lambda o: (
        o.choice.tensor_parallel != wanted.tensor_parallel,
        o.choice.recompute != wanted.recompute, o.choice.reshard != wanted.reshard))


def _suggestions(graph: LayerGraph, topology: Topology, request: Request) -> Iterator[str]:
    changes: list[tuple[str, dict[str, Any]]] = []
    for name in ("tp", "pp", "dp_shard", "dp_replicate", "micro_batch", "recompute", "schedule"):
        value = getattr(request, name)
        if value is not None:
            changes.append((f"another {name} than the demanded {value}", {name: None}))
    if request.use_all_devices:
        changes.append(("fewer devices than all", {"use_all_devices": False}))
    if request.memory_margin > 0.02:
        changes.append((f"a memory margin of 2 % instead of {request.memory_margin:.0%} "
                        "(such plans fail now and then)", {"memory_margin": 0.02}))
    if request.precision in ("bf16-mixed", "fp16-mixed"):
        changes.append(("precision bf16: no fp32 master weights or moments, other numerics",
                        {"precision": "bf16"}))
    if request.optimizer == "adamw":
        changes.append(("optimizer lion: one moment instead of two, another optimizer",
                        {"optimizer": "lion"}))
    if not request.fused_optimizer:
        changes.append(("a fused optimizer step", {"fused_optimizer": True}))
    if graph.sample == "tokens" and request.seq_len >= 256 and graph.fixed_seq_len is None:
        changes.append((f"half the sequence length, {request.seq_len // 2}",
                        {"seq_len": request.seq_len // 2}))
    for text, change in changes:
        if _fits(graph, topology, replace(request, **change)):
            yield text
    yield from _more_devices(graph, topology, request)


def _more_devices(graph: LayerGraph, topology: Topology, request: Request) -> Iterator[str]:
    """The smallest number of devices of the last host group's kind that fits."""
    group = topology.hosts[-1]
    others = topology.num_devices - group.num_devices

    def enlarged(count: int) -> Topology:
        return replace(topology, hosts=(*topology.hosts[:-1], replace(group, count=count)))

    def fits(count: int) -> bool:
        return _fits(graph, enlarged(count), request)

    most = min((MAX_DEVICES - others) // group.devices_per_host, group.count * 1024)
    found = _first_true(fits, group.count + 1, most)
    if found is None:
        yield from ()
        return
    total = others + found * group.devices_per_host
    yield (f"{total} devices instead of {topology.num_devices}: {found} hosts of "
           f"{group.devices_per_host} {group.device.name} (the fewest that fit)")


def _first_true(test: Callable[[int], bool], low: int, most: int) -> int | None:
    """The smallest number in low..most that passes, by doubling and halving."""
    high = low
    while not test(high):
        if high >= most:
            return None
        low, high = high + 1, min(most, high * 2)
    while low < high:
        middle = (low + high) // 2
        if test(middle):
            high = middle
        else:
            low = middle + 1
    return high
