"""Pricing: a layout's predicted step time and memory, as named terms that add up.

    step = (m - 1/v) * slowest + (sum of t_r) / v + max_r tail_r + rest

with t_r the seconds of pipeline rank r for one micro-batch, `slowest` = max_r t_r (GPipe: max f +
max b), tail_r what follows the last backward on rank r, and `rest` the reductions of tied
parameters and of the gradient norm. See `planner/cost/pipeline.py` for the schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.cost.layer import LayerCost, ParameterCost
from planner.cost.pipeline import in_flight, pipeline_seconds, replay
from planner.costing import Candidate, Coster, CutCost, RankContext, TieCost
from planner.layout import Choice, Layout, Prediction, Stage, StagePrediction
from planner.sources import measured_sources
from planner.topology import Topology
from profiler.layer_graph import LayerGraph

__all__ = ["Evaluation", "RankTotal", "candidate_of", "evaluate", "predict", "price", "segments_of",
           "step_terms", "tail_seconds"]

Segment = Sequence[tuple[int, int, Choice]]
"""One stage: (run index, number of its layers, choice) in order."""


@dataclass(slots=True)
class RankTotal:
    """Sums over the layers of one pipeline rank."""

    context: RankContext
    chunk_forward_s: list[float] = field(default_factory=list)
    chunk_backward_s: list[float] = field(default_factory=list)
    chunk_activation_bytes: list[int] = field(default_factory=list)
    chunk_output_bytes: list[int] = field(default_factory=list)
    terms_s: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    working_set_bytes: int = 0
    temporary_bytes: int = 0
    tied_gather_s: float = 0.0
    tied_reduce_s: float = 0.0
    reduce_s: float = 0.0
    window_s: float = 0.0
    optimizer_s: float = 0.0
    norm_s: float = 0.0
    ties: set[int] = field(default_factory=set)

    def _term(self, name: str, seconds: float) -> None:
        if seconds:
            self.terms_s[name] = self.terms_s.get(name, 0.0) + seconds

    def _bytes(self, name: str, num_bytes: int) -> None:
        if num_bytes:
            self.bytes[name] = self.bytes.get(name, 0) + num_bytes

    def open_chunk(self) -> None:
        """Start the next chunk of this rank."""
        for totals in (self.chunk_forward_s, self.chunk_backward_s):
            totals.append(0.0)
        self.chunk_activation_bytes.append(0)
        self.chunk_output_bytes.append(0)

    def receive_forward(self, cut: CutCost) -> None:
        """Charge what the open chunk does before its layers: the send that it waits for, and the
        model's own forward up to them."""
        self.chunk_forward_s[-1] += cut.forward_s
        self._term("pipeline_receive", cut.forward_s - cut.frame_s)
        self._term("stage_frame", cut.frame_s)

    def receive_backward(self, cut: CutCost) -> None:
        """Charge the send of gradients that the open chunk waits for."""
        self.chunk_backward_s[-1] += cut.backward_s
        self._term("pipeline_receive", cut.backward_s)

    def add_layers(self, cost: LayerCost, count: int) -> None:
        """`count` equal layers in the open chunk."""
        self.chunk_forward_s[-1] += count * cost.forward_s
        self.chunk_backward_s[-1] += count * cost.backward_s
        self._term("forward_compute", count * cost.forward_compute_s)
        self._term("backward_compute", count * cost.backward_compute_s)
        self._term("recompute", count * cost.recompute_s)
        self._term("tensor_parallel_collectives", count * (
            cost.tensor_parallel_forward_s + cost.tensor_parallel_backward_s))
        self._term("parameter_gather", count * (cost.gather_forward_s + cost.gather_backward_s))
        self._term("gradient_reduction", count * cost.reduction_backward_s)
        self.window_s += count * cost.window_s
        self._add_parameters(cost.parameters, count)
        memory = cost.memory
        self._bytes("parameters", count * memory.parameter_bytes)
        self._bytes("compute_copies", count * memory.compute_copy_bytes)
        self._bytes("gradients", count * memory.gradient_bytes)
        self._bytes("optimizer_states", count * memory.optimizer_state_bytes)
        self._bytes("buffers", count * memory.buffer_bytes)
        self.chunk_activation_bytes[-1] += count * memory.activation_bytes
        self.working_set_bytes = max(self.working_set_bytes, memory.working_set_bytes)
        self.temporary_bytes += count * memory.optimizer_temporary_bytes

    def _add_parameters(self, cost: ParameterCost, count: int) -> None:
        self.reduce_s += count * cost.reduce_s
        self.optimizer_s += count * cost.optimizer_s
        self.norm_s += count * cost.norm_s

    def add_tie(self, group: int, cost: TieCost) -> None:
        """A tied parameter that this rank holds, once however many of its layers do."""
        if group not in self.ties:
            self.ties.add(group)
            self._bytes("tied_parameters", cost.static_bytes)
            self.temporary_bytes += cost.temporary_bytes
            self.tied_gather_s += cost.parameters.gather_s
            self.tied_reduce_s += cost.parameters.reduce_each_s
            self._add_parameters(cost.parameters, 1)

    @property
    def micro_batch_s(self) -> float:
        return sum(self.chunk_forward_s) + sum(self.chunk_backward_s)

    def tail_terms(self, overlaps: bool) -> dict[str, float]:
        """What follows the last backward."""
        reduction = tail_seconds(self.reduce_s, self.window_s if overlaps else 0.0,
                                 self.context.group.overlap_slowdown)
        return {"parameter_gather": self.tied_gather_s,
                "gradient_reduction": reduction + self.tied_reduce_s,
                "optimizer_step": self.optimizer_s, "gradient_norm": self.norm_s}

    def memory_terms(self, moments: Sequence[Sequence[int]]) -> dict[str, int]:
        """Named bytes at the peak: in forward and backward, or in the optimizer step."""
        outputs = self.chunk_output_bytes
        moment = max(moments, key=lambda n: sum(
            k * (a + o) for k, a, o in zip(n, self.chunk_activation_bytes, outputs, strict=True)))
        activations = sum(k * a for k, a in zip(moment, self.chunk_activation_bytes, strict=True))
        held = sum(k * o for k, o in zip(moment, outputs, strict=True))
        terms = dict(self.bytes)
        terms["context"] = self.context.context_bytes
        terms["communicators"] = self.context.communicator_bytes
        if activations + held + self.working_set_bytes >= self.temporary_bytes:
            terms |= {"activations": activations, "stage_outputs": held,
                      "working_set": self.working_set_bytes}
        else:
            terms["optimizer_temporaries"] = self.temporary_bytes
        return {name: num_bytes for name, num_bytes in terms.items() if num_bytes}


def tail_seconds(reduce_s: float, window_s: float, slowdown: float) -> float:
    """Exposed part of a reduction R beside a backward W: max((g-1) R, R - (2-g) W)."""
    if window_s <= 0:
        return reduce_s
    return max((slowdown - 1.0) * reduce_s, reduce_s - (2.0 - slowdown) * window_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Totals of every pipeline rank and the step time."""

    ranks: tuple[RankTotal, ...]
    moments: tuple[tuple[tuple[int, ...], ...], ...]
    step_s: float
    rest_s: dict[str, float]
    overlaps: bool

    @property
    def memory(self) -> list[dict[str, int]]:
        return [rank.memory_terms(m) for rank, m in zip(self.ranks, self.moments, strict=True)]

    def overflow_bytes(self) -> list[int]:
        """Bytes above (below: negative) the capacity of each rank."""
        return [sum(terms.values()) - rank.context.capacity_bytes
                for terms, rank in zip(self.memory, self.ranks, strict=True)]

    @property
    def fits(self) -> bool:
        return max(self.overflow_bytes()) <= 0


def evaluate(coster: Coster, candidate: Candidate, stages: Sequence[Segment]) -> Evaluation:
    """Price stages given as segments of runs."""
    mesh, schedule = candidate.mesh, candidate.schedule
    classes, class_of = coster.contexts(mesh)
    ranks = [RankTotal(context=classes[class_of[r]]) for r in range(mesh.pp)]
    runs = coster.chain.runs
    layer = 0
    boundary = None
    for k, segment in enumerate(stages):
        rank = ranks[k % mesh.pp]
        rank.open_chunk()
        if boundary is not None:
            rank.receive_forward(boundary)
        for index, count, choice in segment:
            rank.add_layers(coster.layer(runs[index], choice, candidate, rank.context), count)
            layer += count
            for group, _ in runs[index].tied:
                rank.add_tie(group, coster.tie(group, candidate, rank.context))
        boundary = None
        if k + 1 < len(stages):
            crossing = coster.chain.crossing_before(layer)
            boundary = coster.cut(crossing, candidate, k % mesh.pp)
            rank.receive_backward(boundary)
            rank.chunk_output_bytes[-1] = boundary.held_bytes
    overlaps = coster.overlaps(mesh)
    tails = [sum(rank.tail_terms(overlaps).values()) for rank in ranks]
    rest = _rest(coster, candidate, ranks)
    pipeline = pipeline_seconds(
        schedule.name, schedule.chunks, candidate.num_micro_batches,
        [sum(r.chunk_forward_s) for r in ranks], [sum(r.chunk_backward_s) for r in ranks])
    return Evaluation(
        ranks=tuple(ranks), rest_s=rest, overlaps=overlaps,
        step_s=pipeline + max(tails) + sum(rest.values()),
        moments=tuple(in_flight(schedule.name, mesh.pp, schedule.chunks,
                                candidate.num_micro_batches, r) for r in range(mesh.pp)))


def _rest(coster: Coster, candidate: Candidate, ranks: Sequence[RankTotal]) -> dict[str, float]:
    holders: dict[int, int] = {}
    for rank in ranks:
        for group in rank.ties:
            holders[group] = holders.get(group, 0) + 1
    tied = sum(coster.tie_reduction_s(group, candidate) * (count - 1)
               for group, count in holders.items())
    return {"tied_reduction": tied, "norm_latency": coster.norm_latency_s(candidate.mesh)}


def candidate_of(layout: Layout) -> Candidate:
    """What a layout fixes besides its stages."""
    return Candidate(mesh=layout.mesh, micro_batch=layout.micro_batch,
                     num_micro_batches=layout.num_micro_batches, schedule=layout.schedule)


def segments_of(coster: Coster, stages: Sequence[Stage]) -> list[list[tuple[int, int, Choice]]]:
    """The stages of a layout as segments of runs."""
    run_of = [index for index, run in enumerate(coster.chain.runs) for _ in range(run.count)]
    result = []
    for stage in stages:
        segment: list[tuple[int, int, Choice]] = []
        for layer, choice in stage.iter_layers():
            index = run_of[layer]
            if segment and segment[-1][0] == index and segment[-1][2] == choice:
                segment[-1] = (index, segment[-1][1] + 1, choice)
            else:
                segment.append((index, 1, choice))
        result.append(segment)
    return result


def predict(coster: Coster, layout: Layout) -> Layout:
    """The layout with its prediction filled in; it must be legal (`planner/legality.py`)."""
    candidate = candidate_of(layout)
    result = evaluate(coster, candidate, segments_of(coster, layout.stages))
    mesh, chunks = layout.mesh, layout.schedule.chunks
    stage_forward = [result.ranks[k % mesh.pp].chunk_forward_s[k // mesh.pp]
                     for k in range(len(layout.stages))]
    stage_backward = [result.ranks[k % mesh.pp].chunk_backward_s[k // mesh.pp]
                      for k in range(len(layout.stages))]
    terms = step_terms(result, candidate)
    tail = max(sum(rank.tail_terms(result.overlaps).values()) for rank in result.ranks)
    replayed = replay(layout.schedule.name, mesh.pp, chunks, layout.num_micro_batches,
                      stage_forward, stage_backward) + tail + sum(result.rest_s.values())
    samples_per_s = layout.request.global_batch / result.step_s
    devices = [coster.topology.hosts[g].device for g in
               coster.topology.group_of_device()[coster.placement(mesh).device_of_rank]]
    sources, measured_share = measured_sources(coster, layout, candidate, terms)
    peak = sum(device.peak(layout.request.bytes.dtype) for device in devices)
    return replace(layout, prediction=Prediction(
        step_s=result.step_s,
        step_terms_s=terms,
        replay_s=replayed,
        samples_per_s=samples_per_s,
        tokens_per_s_per_device=samples_per_s * layout.request.seq_len / mesh.num_devices,
        mfu=samples_per_s * coster.model_flops_per_sample / peak,
        stages=_stage_predictions(coster, result),
        sources=sources, measured_share=measured_share))


def price(graph: LayerGraph, topology: Topology, layout: Layout) -> Layout:
    """Price any layout, hand-written too.

    Raises:
        UnsupportedLayout: it is not legal; every violation is listed.
    """
    from planner.legality import check_legal, check_request

    coster = Coster(graph, topology, layout.request)
    check_request(coster)
    check_legal(coster, layout)
    return predict(coster, layout)


def step_terms(result: Evaluation, candidate: Candidate) -> dict[str, float]:
    """The step as named terms: m micro-batches of the slowest rank, the bubble, tail and rest."""
    ranks = result.ranks
    slowest = max(ranks, key=lambda r: r.micro_batch_s)
    m = candidate.num_micro_batches
    terms = {name: m * seconds for name, seconds in slowest.terms_s.items()}
    tails = [rank.tail_terms(result.overlaps) for rank in ranks]
    longest = max(tails, key=lambda t: sum(t.values()))
    pipeline_s = result.step_s - sum(longest.values()) - sum(result.rest_s.values())
    bubble = pipeline_s - m * slowest.micro_batch_s
    if len(ranks) > 1:
        terms["pipeline_bubble"] = bubble
    for name, seconds in (longest | result.rest_s).items():
        if seconds:
            terms[name] = terms.get(name, 0.0) + seconds
    return terms


def _stage_predictions(coster: Coster, result: Evaluation) -> tuple[StagePrediction, ...]:
    predictions = []
    for index, (rank, memory) in enumerate(zip(result.ranks, result.memory, strict=True)):
        names = [coster.topology.hosts[g].device.name for g in rank.context.device_groups]
        predictions.append(StagePrediction(
            pipeline_rank=index,
            device=" + ".join(dict.fromkeys(names)),
            micro_batch_s=dict(rank.terms_s),
            tail_s={k: v for k, v in rank.tail_terms(result.overlaps).items() if v},
            memory_bytes=memory,
            capacity_bytes=rank.context.capacity_bytes,
            in_flight=max(sum(moment) for moment in result.moments[index])))
    return tuple(predictions)
