"""The whole cost of one layer under one choice: the sum of its compute, collectives and memory.

What overlaps: parameter gathers (and reductions after each micro-batch) run beside the layer's own
compute and only the rest is exposed; while both run, compute is slower by the device's
`overlap_slowdown` g, so that work w beside communication c adds

    extra(w, c) = max(0, c - w) + (g - 1) min(w, c)

Parameters that are kept after forward are gathered once a step, beside the first micro-batch; each
micro-batch is charged its share of that. Tensor-parallel collectives are exposed: the next matmul
waits for them. With sequence parallelism a column region gathers its input forward and
reduce-scatters its gradient backward, a row region the reverse (Korthikanti et al., 2022, section
4.2.2); without, each is one all-reduce (Shoeybi et al., 2019).

Where it was measured how far processes drift apart, each collective that is waited for also costs
the wait for the slowest process: w sqrt(t) after t seconds of work, so n of them spread over work
of t seconds cost n w sqrt(t / n) = w sqrt(n t).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from planner.cost.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
)
from planner.cost.compute import ComputeTimes, Shard, collective_counts, reduced_entries
from planner.cost.memory import LayerMemory, local_parameters
from planner.division import kv_copies, kv_parameters
from planner.layout import Choice
from planner.request import Request
from planner.topology_groups import Span
from profiler.layer_graph import Extent, LayerKind

__all__ = ["Group", "LayerCost", "LayerTimes", "ParameterCost", "accumulate_seconds", "layer_cost",
           "layer_parameters", "layer_times", "norm_bytes", "overlap_extra_s", "parameter_cost",
           "tensor_parallel_seconds", "tensor_parallel_waits", "update_bytes", "working_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Where one pipeline rank's groups lie, and the slowest of its devices.

    update_bytes_per_s, norm_bytes_per_s: of the optimizer step, and of the gradient norm. tp,
        shard, replicate: the spans of the axes. gathers_beside: kept parameters are gathered beside
        the first micro-batch. staging_s_per_byte: of a copy into a new buffer; 0 where it was not
        measured: on a GPU such copies run beside compute, at the bandwidth of its memory.
    wait_s_per_root: w of the waiting at collectives; 0 where it was not measured.
    """

    update_bytes_per_s: float
    norm_bytes_per_s: float
    overlap_slowdown: float
    tp: Span
    shard: Span
    replicate: Span
    gathers_beside: bool = True
    staging_s_per_byte: float = 0.0
    wait_s_per_root: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCost:
    """What a layer's parameters cost once a step, whoever computes with them.

    gather_s: one all-gather of the compute copy. reduce_s: reduction after the last micro-batch;
    reduce_each_s: after every one.
    """

    gather_s: float
    reduce_s: float
    reduce_each_s: float
    optimizer_s: float
    norm_s: float


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds per micro-batch of one layer on one rank.

    window_s: what a gradient reduction of the last micro-batch can hide behind: backward work that
        no other communication runs beside.
    """

    forward_compute_s: float
    backward_compute_s: float
    recompute_s: float
    tensor_parallel_forward_s: float
    tensor_parallel_backward_s: float
    gather_forward_s: float
    gather_backward_s: float
    reduction_backward_s: float
    window_s: float

    @property
    def forward_s(self) -> float:
        return self.forward_compute_s + self.tensor_parallel_forward_s + self.gather_forward_s

    @property
    def backward_s(self) -> float:
        return (self.backward_compute_s + self.recompute_s + self.tensor_parallel_backward_s
                + self.gather_backward_s + self.reduction_backward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost(LayerTimes):
    """Seconds per micro-batch, seconds per step, and bytes of one layer on one rank."""

    parameters: ParameterCost
    memory: LayerMemory


def overlap_extra_s(work_s: float, communication_s: float, slowdown: float) -> float:
    """Seconds that communication adds to the work it runs beside."""
    return (max(0.0, communication_s - work_s)
            + (slowdown - 1.0) * min(work_s, communication_s))


def update_bytes(request: Request) -> int:
    """Bytes that the optimizer step moves for one parameter: it, its moments and its gradient are
    read, it and its moments written."""
    size = request.bytes
    return (2 * size.stored_bytes + size.gradient_bytes
            + 2 * request.num_moments * size.state_bytes)


def norm_bytes(request: Request) -> int:
    """Bytes that the norm moves for one gradient: it is read, and read and written by clipping."""
    return 3 * request.bytes.gradient_bytes


def parameter_cost(trainable: int, frozen: int, group: Group, request: Request, *,
                   each_micro_batch: bool, tensor_parallel_copies: int = 0) -> ParameterCost:
    """Once-a-step costs of parameters held by one tensor-parallel rank.

    Reduction: a reduce-scatter over the sharding axis, then an all-reduce of the shard over the
    replicas (HSDP). Optimizer and norm: `update_bytes` and `norm_bytes` of each local parameter.
    Staging, as FSDP2 does (`torch.distributed.fsdp`, `_fsdp_collectives`): a shard is copied into a
    message, and the gathered message into the parameters; gradients are copied into a message
    before a reduction, and pure replicas copy it once more, and their parameters once a step.

    Args:
        tensor_parallel_copies: trainable parameters held whole by each tensor-parallel rank, whose
            gradients under sequence parallelism are sums over the group.
    """
    size = request.bytes
    shard = group.shard.size
    scatter_s = reduce_scatter_seconds(trainable * size.reduce_bytes, group.shard)
    replicas_s = all_reduce_seconds(trainable / shard * size.reduce_bytes, group.replicate)
    copies_s = all_reduce_seconds(tensor_parallel_copies * size.reduce_bytes, group.tp)
    local = trainable / shard
    staged = group.staging_s_per_byte * size.reduce_bytes * trainable
    if shard > 1:
        scatter_s += staged
    elif group.replicate.size > 1:
        replicas_s += 2 * staged
    whole = (trainable + frozen) * size.compute_bytes
    copies = 1 + 1 / shard if shard > 1 else float(group.replicate.size > 1)
    unpacked_s = group.staging_s_per_byte * whole * copies
    return ParameterCost(
        gather_s=all_gather_seconds(whole, group.shard) + unpacked_s,
        reduce_s=replicas_s + copies_s + (0.0 if each_micro_batch else scatter_s),
        reduce_each_s=scatter_s if each_micro_batch else 0.0,
        optimizer_s=local * update_bytes(request) / group.update_bytes_per_s,
        norm_s=local * norm_bytes(request) / group.norm_bytes_per_s)


def layer_parameters(kind: LayerKind, shard: Shard, group: Group, request: Request, *,
                     each_micro_batch: bool, without: frozenset[str] = frozenset()
                     ) -> ParameterCost:
    """Once-a-step costs of a layer's parameters.

    Args:
        shard: with tp = 1 where the layer is held whole.
        each_micro_batch: gradients are reduced after every micro-batch.
        without: tied parameters, which are charged to their group.
    """
    trainable, frozen = local_parameters(kind, shard.tp, without)
    copies = 0
    if group.tp.size > 1 and shard.sequence_parallel:
        whole = kv_parameters(kind) if kv_copies(kind, shard.tp) > 1 else ()
        copies = sum(p.numel for p in kind.parameters if p.trainable and p.name not in without
                     and (p.split == "replicated" or p.name in whole))
    return parameter_cost(trainable, frozen, group, request, tensor_parallel_copies=copies,
                          each_micro_batch=each_micro_batch)


def layer_times(choice: Choice, compute: ComputeTimes, collectives: tuple[float, float, float],
                parameters: ParameterCost, group: Group, *, num_micro_batches: int) -> LayerTimes:
    """Put the seconds of one layer together.

    Args:
        compute: of this rank's share. collectives: of `tensor_parallel_seconds`.
        parameters: of `layer_parameters`.
    """
    return LayerTimes(*_times(choice, compute, collectives, parameters, group, num_micro_batches))


def layer_cost(choice: Choice, compute: ComputeTimes, collectives: tuple[float, float, float],
               parameters: ParameterCost, memory: LayerMemory, group: Group, *,
               num_micro_batches: int) -> LayerCost:
    """Put the parts of one layer's cost together; as `layer_times`, with `layer_memory`."""
    return LayerCost(*_times(choice, compute, collectives, parameters, group, num_micro_batches),
                     parameters=parameters, memory=memory)


def _times(choice: Choice, compute: ComputeTimes, collectives: tuple[float, float, float],
           parameters: ParameterCost, group: Group, num_micro_batches: int) -> tuple[float, ...]:
    """The fields of `LayerTimes` in order."""
    forward_tp, backward_tp, _ = collectives
    forward_s, backward_s, recompute = working_seconds(choice, compute, collectives)
    backward_s += accumulate_seconds(compute, parameters, group, num_micro_batches)
    resharded = choice.reshard and group.shard.size > 1
    gather, slowdown = parameters.gather_s, group.overlap_slowdown
    w = group.wait_s_per_root
    backward_work = backward_s + recompute + backward_tp
    beside = parameters.reduce_each_s + (gather if resharded else 0.0)
    backward_extra = overlap_extra_s(backward_work, beside, slowdown)
    reduce_share = parameters.reduce_each_s / beside if beside else 0.0
    beside_s = forward_s + forward_tp if resharded or group.gathers_beside else 0.0
    forward_extra = overlap_extra_s(beside_s, gather, slowdown)
    gather_forward = forward_extra / (1 if resharded else num_micro_batches)
    gather_backward, reduction = backward_extra * (1 - reduce_share), backward_extra * reduce_share
    if w and (group.shard.size > 1 or group.replicate.size > 1):
        waits = _waits(parameters, forward_s, backward_s + recompute, resharded, w,
                       gathers=group.shard.size > 1)
        gather_forward += waits[0] / (1 if resharded else num_micro_batches)
        gather_backward += waits[1]
        reduction += waits[2] / (1 if parameters.reduce_each_s else num_micro_batches)
    return (forward_s, backward_s, recompute, forward_tp, backward_tp, gather_forward,
            gather_backward, reduction, max(0.0, backward_work - beside))


def _waits(parameters: ParameterCost, forward_s: float, backward_s: float, resharded: bool,
           wait_s_per_root: float, *, gathers: bool) -> tuple[float, float, float]:
    """Waiting at (the gather before forward, the one before backward, the reduction)."""
    gathered = float(gathers and parameters.gather_s > 0)
    again, reduces = gathered * resharded, float(parameters.reduce_s + parameters.reduce_each_s > 0)
    each = wait_s_per_root * sqrt(backward_s / max(1.0, again + reduces))
    return gathered * wait_s_per_root * sqrt(forward_s), again * each, reduces * each


def working_seconds(choice: Choice, compute: ComputeTimes,
                    collectives: tuple[float, float, float]) -> tuple[float, float, float]:
    """(forward, backward, recompute) seconds of one rank for one micro-batch: the device computes
    and communicates while the host launches ahead of it, and the longer of both counts. All but
    the last leave the tensor-parallel collectives out."""
    forward_tp, backward_tp, recompute_tp = collectives
    again = compute.recompute_s(choice.recompute) + recompute_tp
    if not compute.host_forward_s:
        return compute.forward_s, compute.backward_s, again
    return (max(compute.forward_s, compute.host_forward_s - forward_tp),
            max(compute.backward_s, compute.host_backward_s - backward_tp),
            max(again, compute.host_recompute_s(choice.recompute)))


def accumulate_seconds(compute: ComputeTimes, parameters: ParameterCost, group: Group,
                       num_micro_batches: int) -> float:
    """Each micro-batch's share of adding gradients: all but the first add theirs, to the shard if
    they are reduced each time."""
    part = group.shard.size if parameters.reduce_each_s else 1
    return compute.accumulate_s / part * (num_micro_batches - 1) / num_micro_batches


def tensor_parallel_seconds(kind: LayerKind, choice: Choice, shard: Shard, span: Span,
                            inputs: Extent) -> tuple[float, float, float]:
    """(forward, backward, recompute) seconds of the layer's tensor-parallel collectives."""
    if span.size == 1 or kind.tensor_parallel is None:
        return 0.0, 0.0, 0.0
    b, s, width = shard.micro_batch, shard.seq_len, shard.compute_bytes
    if not choice.tensor_parallel:
        if not shard.sequence_parallel:
            return 0.0, 0.0, 0.0
        # Held whole: gather the sequence in, keep one slice of the output; the reverse backward.
        once = all_gather_seconds(inputs.at(b, s) * width, span)
        return once, once, once if choice.recompute == "full" else 0.0
    entries = [e.at(b, s) * width for e in kind.tensor_parallel.entries]
    exits = [e.at(b, s) * width for e in kind.tensor_parallel.exits]
    if shard.sequence_parallel:
        gather_in = sum(all_gather_seconds(x, span) for x in entries)
        scatter_out = sum(reduce_scatter_seconds(x, span) for x in exits)
        forward, backward = gather_in + scatter_out, gather_in + scatter_out
    else:
        gather_in = 0.0
        forward = sum(all_reduce_seconds(x, span) for x in exits)
        backward = sum(all_reduce_seconds(e.at(b, s) * width, span)
                       for e in reduced_entries(kind.tensor_parallel))
    again = {"none": 0.0, "selective": gather_in, "full": forward}[choice.recompute]
    return forward, backward, again


def tensor_parallel_waits(kind: LayerKind, choice: Choice, shard: Shard, compute: ComputeTimes,
                          wait_s_per_root: float) -> tuple[float, float, float]:
    """(forward, backward, recompute) seconds of waiting at the collectives of
    `tensor_parallel_seconds`."""
    if kind.tensor_parallel is None or not wait_s_per_root or not (
            choice.tensor_parallel or shard.sequence_parallel):
        return 0.0, 0.0, 0.0
    forward, backward, selective = 1, 1, 0
    if choice.tensor_parallel:
        forward, backward = collective_counts(kind, shard)
        selective = len(kind.tensor_parallel.entries) if shard.sequence_parallel else 0
    again = {"none": 0, "selective": selective, "full": forward}[choice.recompute]
    return (wait_s_per_root * sqrt(forward * compute.forward_s),
            wait_s_per_root * sqrt(backward * compute.backward_s),
            wait_s_per_root * sqrt(again * compute.recompute_s(choice.recompute)))
