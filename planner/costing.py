"""Costs of one model on one topology under one request, remembered between candidates.

The pricing of a given layout and the program that looks for the best one both ask here, so that
there is one cost model. A `Candidate` fixes everything but the stages and the choices of the
layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.capabilities import Capabilities, RecomputeMode, load_capabilities
from planner.chain import Chain, Crossing, Run, make_chain
from planner.cost.collectives import all_gather_seconds, all_reduce_seconds, send_seconds
from planner.cost.compute import ComputeTimes, Shard, split_degree
from planner.cost.layer import (
    Group,
    LayerCost,
    LayerTimes,
    ParameterCost,
    layer_cost,
    layer_parameters,
    layer_times,
    norm_bytes,
    parameter_cost,
    tensor_parallel_seconds,
    tensor_parallel_waits,
    update_bytes,
)
from planner.cost.memory import (
    BLOCK_BYTES,
    ActivationMemory,
    LayerMemory,
    compute_copy_bytes,
    local_parameters,
    optimizer_temporary_bytes,
    total_memory,
)
from planner.division import tie_divides
from planner.layout import Axis, Choice, Mesh, Schedule
from planner.link_fits import LinkTable
from planner.measured import MeasuredLayers, choose_profile, slowest
from planner.measured_memory import most_activations
from planner.request import Request
from planner.stacks import load_stack
from planner.stacks.equipment import equip
from planner.stacks.lowering import lower
from planner.topology import Topology
from planner.topology_groups import Placement, Span, Stage
from profiler.layer_graph import LayerGraph

__all__ = ["Candidate", "Coster", "CutCost", "RankContext", "TieCost"]

_SPANNED: tuple[Axis, ...] = ("tp", "dp_shard", "dp_replicate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A mesh, a micro-batch and a schedule."""

    mesh: Mesh
    micro_batch: int
    num_micro_batches: int
    schedule: Schedule

    @property
    def each_micro_batch(self) -> bool:
        return self.schedule.gradient_sync == "each_micro_batch" and self.mesh.dp_shard > 1

    @property
    def unsharded_gradients(self) -> bool:
        """Whether whole gradients are held from the first micro-batch to the end of the step."""
        waits = self.num_micro_batches > 1 or self.mesh.pp > 1
        return self.mesh.dp_shard > 1 and waits and not self.each_micro_batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankContext:
    """A class of pipeline ranks that cost the same; equal ones are one object within a Coster.

    device_groups: the topology's host groups that its devices belong to.
    capacity_bytes: what the request lets them use. overhead_bytes: context and communicators.
    """

    device_groups: tuple[int, ...]
    group: Group
    capacity_bytes: int
    context_bytes: int
    communicator_bytes: int

    @property
    def overhead_bytes(self) -> int:
        return self.context_bytes + self.communicator_bytes


@dataclass(frozen=True, slots=True)
class CutCost:
    """What a cut costs: seconds to receive the activations and the gradients, bytes held.

    frame_s: the part of forward_s that is the model's own forward up to the next stage's layers.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    held_bytes: int = 0
    frame_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TieCost:
    """A tied parameter on each rank that holds it: it stays gathered, once a step.

    parameters: with reduce_each_s of all micro-batches together, beside nothing.
    """

    static_bytes: int
    temporary_bytes: int
    parameters: ParameterCost


class Coster:
    """The cost functions applied to one (model, topology, request); every answer is remembered."""

    def __init__(self, graph: LayerGraph, topology: Topology, request: Request) -> None:
        self.stack = load_stack(request.stack_name)
        self.graph = lower(graph, self.stack)
        self.topology = equip(topology, self.stack)
        self.request = request
        self.capabilities: Capabilities = load_capabilities(request.target)
        self.chain: Chain = make_chain(graph)
        self.seq_len = request.seq_len
        self.links = LinkTable(topology.links) if topology.links is not None else None
        self.measured = [MeasuredLayers(self.graph, choose_profile(
            self.graph, host.device.name, request.bytes.dtype, host.devices_per_host))
            for host in self.topology.hosts]
        self._waits = [measured.wait_s_per_root for measured in self.measured]
        self._accumulates = any(measured.accumulates for measured in self.measured)
        self._placements: dict[tuple[tuple[int, ...], int], Placement] = {}
        self._compute: dict[tuple[str, Shard, int], ComputeTimes] = {}
        self._layers: dict[object, LayerCost] = {}
        self._shards: dict[tuple[int, int, bool], Shard] = {}
        self.choice_cache: dict[object, list[Choice]] = {}  # of planner/problem.py, as the next
        self.option_cache: dict[object, Any] = {}
        self.receive_cache: dict[object, tuple[float, float]] = {}
        self.mesh_cache: dict[tuple[int, int, int, int], list[Mesh]] = {}  # of planner/space.py
        self._interned: dict[object, RankContext] = {}
        self._work: dict[object, tuple[ComputeTimes, tuple[float, float, float]]] = {}
        self._parameters: dict[object, ParameterCost] = {}
        self._memory: dict[object, LayerMemory] = {}
        self._activations: dict[object, ActivationMemory] = {}
        self._local_parameters: dict[tuple[int, int], tuple[int, int]] = {}
        self._spans: dict[Span, Span] = {}
        self._cuts: dict[object, CutCost] = {}
        self._norms: dict[Mesh, float] = {}
        self._contexts: dict[object, tuple[tuple[RankContext, ...], tuple[int, ...]]] = {}

    # --- where the ranks lie

    def placement(self, mesh: Mesh) -> Placement:
        """Ranks on devices: the host groups in the mesh's order, filled from the first device
        on."""
        order = mesh.host_groups or tuple(range(len(self.topology.hosts)))
        key = (order, mesh.num_devices)
        if key not in self._placements:
            if order == tuple(range(len(self.topology.hosts))):
                ranks: int | np.ndarray = mesh.num_devices
            else:
                of_device = self.topology.group_of_device()
                ranks = np.concatenate([np.flatnonzero(of_device == g) for g in order])
                ranks = ranks[:mesh.num_devices]
            self._placements[key] = Placement(self.topology, ranks, self.links)
        return self._placements[key]

    def contexts(self, mesh: Mesh) -> tuple[tuple[RankContext, ...], tuple[int, ...]]:
        """(classes of pipeline ranks, class of each pipeline rank)."""
        key = (mesh.order, mesh.host_groups, mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.tp)
        if key not in self._contexts:
            self._contexts[key] = self._make_contexts(mesh)
        return self._contexts[key]

    def _make_contexts(self, mesh: Mesh) -> tuple[tuple[RankContext, ...], tuple[int, ...]]:
        if self.topology.is_uniform:
            return (self._context(mesh, (0,), None),), (0,) * mesh.pp
        placement = self.placement(mesh)
        groups = self.topology.group_of_device()[placement.device_of_rank]
        pp_stride = mesh.stride("pp") if mesh.pp > 1 else mesh.num_devices
        coordinate = np.arange(mesh.num_devices) // pp_stride % mesh.pp
        found: dict[RankContext, int] = {}
        of_rank = []
        for rank in range(mesh.pp):
            kinds = tuple(int(g) for g in np.unique(groups[coordinate == rank]))
            context = self._context(mesh, kinds, (mesh.pp, pp_stride, rank))
            of_rank.append(found.setdefault(context, len(found)))
        return tuple(found), tuple(of_rank)

    def _context(self, mesh: Mesh, kinds: tuple[int, ...], stage: Stage | None) -> RankContext:
        placement = self.placement(mesh)
        spans = {axis: placement.span(mesh.degree(axis), mesh.stride(axis), stage=stage)
                 for axis in _SPANNED}
        spans = {axis: self._spans.setdefault(span, span) for axis, span in spans.items()}
        devices = [self.topology.hosts[g].device for g in kinds]
        axes = sum(mesh.degree(axis) > 1 for axis in (*_SPANNED, "pp"))
        communicators = axes + (1 if axes > 1 else 0)  # the world has one more
        margin = 1.0 - self.request.memory_margin
        group = Group(
            update_bytes_per_s=min(self.stream_bytes_per_s(g)[0] for g in kinds),
            norm_bytes_per_s=min(self.stream_bytes_per_s(g)[1] for g in kinds),
            overlap_slowdown=min(2.0, max(d.overlap_slowdown for d in devices)),
            tp=spans["tp"], shard=spans["dp_shard"], replicate=spans["dp_replicate"],
            gathers_beside=self.stack.overlaps_parameter_gather,
            staging_s_per_byte=min(self.staging_s_per_byte(g) for g in kinds),
            wait_s_per_root=max(self._waits[g] for g in kinds))
        return self._interned.setdefault((kinds, group, communicators), RankContext(
            device_groups=kinds,
            group=group,
            capacity_bytes=min(int(d.memory_bytes * margin) for d in devices),
            context_bytes=max(self.device_context_bytes(g) for g in kinds),
            communicator_bytes=max(d.communicator_bytes for d in devices) * communicators))

    # --- layers

    def sequence_parallel(self, tp: int) -> bool:
        """Whether activations between layers are divided along the sequence."""
        return (tp > 1 and self.wants_sequence_parallel and self.graph.sample == "tokens"
                and self.seq_len % tp == 0)

    @property
    def wants_sequence_parallel(self) -> bool:
        """Whether target, stack and request have sequence parallelism."""
        return (self.capabilities.sequence_parallel and self.stack.sequence_parallel
                and self.request.sequence_parallel is not False)

    def shard(self, micro_batch: int, tp: int, choice: Choice) -> Shard:
        """The share of a layer that one rank computes."""
        key = (micro_batch, tp, choice.tensor_parallel)
        shard = self._shards.get(key)
        if shard is None:
            size = self.request.bytes
            shard = self._shards[key] = Shard(
                micro_batch=micro_batch, seq_len=self.seq_len, dtype=size.dtype,
                tp=tp if choice.tensor_parallel else 1, compute_bytes=size.compute_bytes,
                sequence_parallel=self.sequence_parallel(tp))
        return shard

    def compute(self, kind: str, shard: Shard, device_groups: Iterable[int]) -> ComputeTimes:
        """Compute seconds on the slowest of some devices."""
        times = []
        for group in device_groups:
            key = (kind, shard, group)
            if key not in self._compute:
                self._compute[key] = self.measured[group].seconds(
                    kind, shard, self.topology.hosts[group].device)
            times.append(self._compute[key])
        return slowest(times)

    def times_of(self, candidate: Candidate) -> int:
        """The micro-batches that the costs of a layer depend on; 1 where they do not."""
        mesh = candidate.mesh
        depends = (self._accumulates or mesh.dp_shard > 1
                   or (mesh.dp_replicate > 1 and any(self._waits)))
        return candidate.num_micro_batches if depends else 1

    def stream_bytes_per_s(self, group: int) -> tuple[float, float]:
        """Bytes per second of the optimizer step and of the gradient norm on a host group."""
        device = self.topology.hosts[group].device
        analytic = device.memory_bandwidth_bytes_per_s * device.memory_efficiency.fraction[-1]
        update = self.measured[group].update(self.request)
        if update is None:
            return analytic, analytic
        count = update.num_parameters
        return (count * update_bytes(self.request) / update.update_s,
                count * norm_bytes(self.request) / update.norm_s)

    def staging_s_per_byte(self, group: int) -> float:
        """Seconds per byte of gradients copied into a message, where it was measured."""
        update = self.measured[group].update(self.request)
        if not self.stack.copies_messages or update is None or update.staging_s is None:
            return 0.0
        return update.staging_s / (update.num_parameters * self.request.bytes.stored_bytes)

    def layer(self, run: Run, choice: Choice, candidate: Candidate, context: RankContext
              ) -> LayerCost:
        """The cost of one layer of a run."""
        key = (run.first, choice, context, candidate.micro_batch, self.times_of(candidate),
               candidate.each_micro_batch, candidate.unsharded_gradients, candidate.mesh.tp)
        cost = self._layers.get(key)
        if cost is None:
            cost = self._layers[key] = self._layer(run, choice, candidate, context)
        return cost

    def _layer(self, run: Run, choice: Choice, candidate: Candidate, context: RankContext
               ) -> LayerCost:
        """Each part depends on less than the whole, and is remembered by what it depends on."""
        compute, collectives, parameters = self._parts_of(run, choice, candidate, context)
        return layer_cost(choice, compute, collectives, parameters,
                          self.memory(run, choice, candidate), context.group,
                          num_micro_batches=candidate.num_micro_batches)

    def seconds(self, run: Run, choice: Choice, candidate: Candidate, context: RankContext
                ) -> tuple[LayerTimes, ParameterCost]:
        """The seconds of one layer of a run, without its memory."""
        compute, collectives, parameters = self._parts_of(run, choice, candidate, context)
        return layer_times(choice, compute, collectives, parameters, context.group,
                           num_micro_batches=candidate.num_micro_batches), parameters

    def _parts_of(self, run: Run, choice: Choice, candidate: Candidate, context: RankContext
                  ) -> tuple[ComputeTimes, tuple[float, float, float], ParameterCost]:
        mesh = candidate.mesh
        # Short keys: a run by its first layer, a shard by what makes it, a span by its identity
        # (equal ones are one object): hashing the records would cost more than the parts do.
        key = (run.first, choice.recompute, choice.tensor_parallel, candidate.micro_batch, mesh.tp,
               id(context.group.tp), context.device_groups)
        work = self._work.get(key)
        if work is None:
            shard = self.shard(candidate.micro_batch, mesh.tp, choice)
            kind = self.graph.kinds[run.kind]
            compute = self.compute(run.kind, shard, context.device_groups)
            collectives = tensor_parallel_seconds(kind, choice, shard, context.group.tp, run.input)
            if context.group.tp.size > 1:
                waits = tensor_parallel_waits(kind, choice, shard, compute,
                                              context.group.wait_s_per_root)
                collectives = (collectives[0] + waits[0], collectives[1] + waits[1],
                               collectives[2] + waits[2])
            work = self._work[key] = compute, collectives
        return *work, self.parameters(run, choice, mesh.tp, context,
                                      each_micro_batch=candidate.each_micro_batch)

    def memory(self, run: Run, choice: Choice, candidate: Candidate) -> LayerMemory:
        """The bytes of one layer of a run."""
        mesh, whole = candidate.mesh, candidate.unsharded_gradients
        key = (run.first, choice, candidate.micro_batch, mesh.tp, mesh.dp_shard,
               mesh.dp_replicate > 1, whole)
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = total_memory(
                self.activations(run, choice, candidate.micro_batch, mesh.tp),
                self.local_parameters(run, mesh.tp if choice.tensor_parallel else 1),
                self.graph.kinds[run.kind].buffer_bytes, choice, request=self.request,
                dp_shard=mesh.dp_shard, unsharded_gradients=whole,
                copies_replicas=self._copies_replicas(mesh), temporary_bytes=self.temporary_bytes)
        return memory

    def _copies_replicas(self, mesh: Mesh) -> bool:
        """Whether whole parameters are copied to be computed with (see `total_memory`)."""
        wrapped = mesh.dp_replicate > 1 or self.request.bytes.has_compute_copy
        return self.stack.copies_messages and mesh.dp_shard == 1 and wrapped

    def activations(self, run: Run, choice: Choice, micro_batch: int, tp: int) -> ActivationMemory:
        """What one layer of a run keeps and works with for a micro-batch."""
        key = (run.first, choice.recompute, choice.tensor_parallel, micro_batch, tp)
        found = self._activations.get(key)
        if found is None:
            found = self._activations[key] = self.activations_of(
                run.kind, choice.recompute, self.shard(micro_batch, tp, choice))
        return found

    def activations_of(self, kind: str, recompute: RecomputeMode, shard: Shard
                       ) -> ActivationMemory:
        """The most on any device kind, each by what is measured first."""
        return most_activations(self.graph.kinds[kind], recompute, shard,
                                [measured.memory(kind, shard) for measured in self.measured])

    def has_measured_memory(self, kind: str, shard: Shard) -> bool:
        """Whether the bytes of a layer are measured on every device kind."""
        return all(measured.memory(kind, shard) is not None for measured in self.measured)

    @functools.cached_property
    def temporary_bytes(self) -> float | None:
        """Of the optimizer step for one parameter, if measured on every device kind: the most."""
        found = [measured.temporary_bytes(self.request) for measured in self.measured]
        return None if None in found else max(x for x in found if x is not None)

    def device_context_bytes(self, group: int) -> int:
        """What a process on a host group holds before it allocates, by what is measured first."""
        return (self.measured[group].context_bytes
                or self.topology.hosts[group].device.context_bytes)

    def local_parameters(self, run: Run, tp: int) -> tuple[int, int]:
        """(trainable, frozen) parameters of one layer of a run on one rank, tied ones left out."""
        if (run.first, tp) not in self._local_parameters:
            self._local_parameters[run.first, tp] = local_parameters(
                self.graph.kinds[run.kind], tp, frozenset(name for _, name in run.tied))
        return self._local_parameters[run.first, tp]

    def parameters(self, run: Run, choice: Choice, tp: int, context: RankContext, *,
                   each_micro_batch: bool) -> ParameterCost:
        """Once-a-step costs of the parameters of one layer of a run."""
        key = (run.first, choice.tensor_parallel, tp, id(context), each_micro_batch)
        cost = self._parameters.get(key)
        if cost is None:
            cost = self._parameters[key] = layer_parameters(
                self.graph.kinds[run.kind], self.shard(1, tp, choice), context.group, self.request,
                without=frozenset(name for _, name in run.tied), each_micro_batch=each_micro_batch)
        return cost

    # --- cuts, ties, the end of the step

    def cut(self, crossing: Crossing, candidate: Candidate, sender: int) -> CutCost:
        """What crossing from pipeline rank `sender` to the next costs one micro-batch."""
        mesh = candidate.mesh
        key = (id(crossing), mesh, candidate.micro_batch, candidate.schedule.chunks > 1, sender)
        if key not in self._cuts:  # the chain keeps its crossings alive
            self._cuts[key] = self._cut(crossing, candidate, sender)
        return self._cuts[key]

    def _cut(self, crossing: Crossing, candidate: Candidate, sender: int) -> CutCost:
        mesh = candidate.mesh
        edge = self.placement(mesh).pipeline_edge(
            mesh.stride("pp"), degree=mesh.pp, index=None if self.topology.is_uniform else sender,
            wrap=candidate.schedule.chunks > 1)
        divided = split_degree("sequence", mesh.tp, self.sequence_parallel(mesh.tp))
        scattered = mesh.tp if self.stack.scatters_sends else divided
        forward, backward = crossing.bytes_at(candidate.micro_batch, self.seq_len,
                                              self.request.bytes.compute_bytes)
        held = -(-forward // divided)
        gather = [0.0, 0.0]
        classes, of_rank = self.contexts(mesh)
        shard = self.shard(candidate.micro_batch, mesh.tp, Choice())
        frame_s = max(self.measured[group].frame_s(shard) for group in
                      classes[of_rank[(sender + 1) % mesh.pp]].device_groups)
        if scattered > divided:  # each rank sends its part, and the receivers gather it
            span = classes[of_rank[sender]].group.tp
            gather = [all_gather_seconds(x, span) for x in (forward, backward)]
        return CutCost(frame_s=frame_s,
                       forward_s=send_seconds(forward / scattered, edge) + gather[0] + frame_s,
                       backward_s=send_seconds(backward / scattered, edge) + gather[1],
                       held_bytes=-(-held // BLOCK_BYTES) * BLOCK_BYTES)

    def tie(self, group: int, candidate: Candidate, context: RankContext) -> TieCost:
        """A tied parameter where it is held. It stays gathered and divided like its first layer."""
        layer, name = self.chain.tied_places[group][0]
        kind = self.graph.kind_of(layer)
        others = frozenset(p.name for p in kind.parameters if p.name != name)
        tp = self._tie_degree(group, candidate)
        trainable, frozen = local_parameters(kind, tp, others)
        size, shard = self.request.bytes, candidate.mesh.dp_shard
        parameters = parameter_cost(trainable, frozen, context.group, self.request,
                                    each_micro_batch=candidate.each_micro_batch)
        # It is reduced when backward is over, so that nothing is left to hide behind.
        parameters = replace(parameters, reduce_each_s=(
            candidate.num_micro_batches * parameters.reduce_each_s))
        gradient = (trainable * size.reduce_bytes if candidate.unsharded_gradients
                    else trainable * size.gradient_bytes / shard) + trainable * size.beside_bytes
        state = trainable * self.request.num_moments * size.state_bytes / shard
        stored = (trainable * size.stored_bytes + frozen * size.compute_bytes) / shard
        copy = compute_copy_bytes((trainable, frozen), self.request, copies_all=(
            shard > 1 or self._copies_replicas(candidate.mesh)))
        temporary = trainable / shard * optimizer_temporary_bytes(self.request,
                                                                  self.temporary_bytes)
        blocks = [-(-int(x) // BLOCK_BYTES) * BLOCK_BYTES
                  for x in (gradient + state + stored + copy, temporary)]
        return TieCost(static_bytes=blocks[0], temporary_bytes=blocks[1], parameters=parameters)

    def _tie_degree(self, group: int, candidate: Candidate) -> int:
        """Over how many ranks a tied parameter is divided."""
        tp = candidate.mesh.tp
        return tp if tp == 1 or tie_divides(self.graph, group, tp, self.capabilities) else 1

    def tie_reduction_s(self, group: int, candidate: Candidate) -> float:
        """All-reduce of a tied gradient between two pipeline ranks that hold the parameter."""
        layer, name = self.chain.tied_places[group][0]
        kind = self.graph.kind_of(layer)
        others = frozenset(p.name for p in kind.parameters if p.name != name)
        trainable, _ = local_parameters(kind, self._tie_degree(group, candidate), others)
        num_bytes = trainable * self.request.bytes.reduce_bytes / candidate.mesh.dp_shard
        mesh = candidate.mesh
        edge = self.placement(mesh).pipeline_edge(mesh.stride("pp"), degree=mesh.pp, wrap=True)
        return send_seconds(num_bytes, edge) + edge.latency_s if trainable else 0.0

    def norm_latency_s(self, mesh: Mesh) -> float:
        """The all-reduce of the gradient norm, one number, over every axis in turn."""
        if mesh in self._norms:
            return self._norms[mesh]
        classes, _ = self.contexts(mesh)
        latency = max(sum(all_reduce_seconds(4, getattr(c.group, name))
                          for name in ("tp", "shard", "replicate")) for c in classes)
        if mesh.pp > 1:
            stride = mesh.stride("pp")
            latency += all_reduce_seconds(4, self.placement(mesh).span(mesh.pp, stride))
        self._norms[mesh] = latency
        return latency

    def edge_signature(self, mesh: Mesh) -> object:
        """What the sends between stages depend on: equal signatures, equal costs."""
        if mesh.pp == 1:
            return None
        placement, stride = self.placement(mesh), mesh.stride("pp")
        norm = placement.span(mesh.pp, stride)
        if self.topology.is_uniform:
            return norm, *(placement.pipeline_edge(stride, degree=mesh.pp, wrap=wrap)
                           for wrap in (False, True))
        return norm, *(placement.pipeline_edge(stride, degree=mesh.pp, index=sender, wrap=wrap)
                       for wrap in (False, True) for sender in range(mesh.pp - 1 + wrap))

    def overlaps(self, mesh: Mesh) -> bool:
        """Whether the last gradient reduction runs beside the last backward."""
        if self.stack.overlaps_gradient_reduction is not None:
            return self.stack.overlaps_gradient_reduction
        return mesh.pp == 1 or self.capabilities.gradient_overlap_with_pipeline

    @functools.cached_property
    def model_flops_per_sample(self) -> int:
        """Matmuls and attention of one forward and backward of one sample."""
        return (self.graph.forward_flops(1, self.seq_len)
                + self.graph.backward_flops(1, self.seq_len))
