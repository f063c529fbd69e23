"""Layouts written by hand, and what pricing says of them, in the words of the cases."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from planner import models, topology_files
from planner.capabilities import RecomputeMode, ScheduleName
from planner.layout import (
    Choice,
    LayerRun,
    Layout,
    Mesh,
    Prediction,
    Reference,
    Schedule,
    Stage,
    StagePrediction,
)
from planner.pricing import price
from planner.request import Request
from planner.topology import Link, Topology
from profiler.device import load_device
from profiler.layer_graph import LayerGraph

__all__ = ["GB", "STATES", "device_states_gb", "fits", "hosts", "model", "predict", "states_gb",
           "topology", "write"]

GB = 1e9
STATES = ("parameters", "compute_copies", "gradients", "optimizer_states", "tied_parameters")


@functools.cache
def model(name: str) -> LayerGraph:
    return models.resolve(name)


@functools.cache
def topology(name: str) -> Topology:
    return topology_files.resolve(name)


def hosts(preset: str, count: int, *, devices: int | None = None, device: str | None = None,
          memory_bytes: int | None = None, between_hosts: Link | None = None) -> Topology:
    """Hosts like a preset's, with something changed: devices a host, their kind, their memory."""
    group = topology(preset).hosts[0]
    kind = load_device(device) if device else group.device
    kind = replace(kind, memory_bytes=memory_bytes or kind.memory_bytes)
    return replace(topology(preset), name=f"{preset}:{count}", hosts=(replace(
        group, count=count, devices_per_host=devices or group.devices_per_host, device=kind,
        network_card=between_hosts or group.network_card),))


def block_span(graph: LayerGraph) -> tuple[int, int]:
    """(first, one past the last) of the longest run of equal layers: the blocks."""
    kinds = [layer.kind for layer in graph.layers]
    block = max(set(kinds), key=kinds.count)
    return kinds.index(block), len(kinds) - kinds[::-1].index(block)


def cut(graph: LayerGraph, num_stages: int, blocks: Sequence[int] | None) -> list[int]:
    """Where stages begin and end; `blocks` a stage, by default as even as can be, more first.

    What is before the blocks goes to the first stage, what is behind them to the last.
    """
    first, end = block_span(graph)
    count, more = divmod(end - first, num_stages)
    blocks = blocks or [count + (i < more) for i in range(num_stages)]
    inner = [first + n for n in accumulate(blocks)]
    last = len(graph.layers) if inner[-1] == end else inner[-1]
    return [0, *inner[:-1], last]


def write(graph: LayerGraph, request: Request, *, pp: int = 1, dp_replicate: int = 1,
          dp_shard: int = 1, tp: int = 1, ep: int = 1, micro_batch: int = 1,
          schedule: ScheduleName = "1f1b", chunks: int = 1, each_micro_batch: bool = False,
          recompute: RecomputeMode = "none", reshard: bool = True,
          blocks: Sequence[int] | None = None, whole: Sequence[str] = ()) -> Layout:
    """A layout with one choice for all layers.

    reshard: parameters are freed after forward (ZeRO-3), or kept (ZeRO-1 and 2).
    blocks: transformer blocks of each stage. whole: kinds of layers that are not divided over tp.
    """
    stages = []
    for a, b in pairwise(cut(graph, pp * chunks, blocks)):
        runs = [LayerRun(first_layer=i, num_layers=1, choice=Choice(
                    recompute=recompute, reshard=reshard,
                    tensor_parallel=graph.layers[i].kind not in whole)) for i in range(a, b)]
        stages.append(Stage(runs=tuple(runs)))
    sync: Any = "each_micro_batch" if each_micro_batch else "last_micro_batch"
    order: Any = ("pp", "dp_replicate", "dp_shard", "ep", "tp")
    per_rank = request.global_batch // (dp_replicate * dp_shard * micro_batch)
    return Layout(
        model=Reference(name=graph.name), topology=Reference(name="by hand"), request=request,
        mesh=Mesh(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, ep=ep, order=order),
        micro_batch=micro_batch, num_micro_batches=max(per_rank, 1), stages=tuple(stages),
        schedule=Schedule(name=schedule, chunks=chunks, gradient_sync=sync))


def predict(graph: LayerGraph, devices: Topology | str, request: Request, **how: Any
            ) -> Prediction:
    """Write a layout and price it."""
    where = topology(devices) if isinstance(devices, str) else devices
    prediction = price(graph, where, write(graph, request, **how)).prediction
    assert prediction is not None
    return prediction


def states_gb(stage: StagePrediction, names: Sequence[str] = STATES) -> float:
    """Parameters, copies, gradients and moments of one device, in GB."""
    return sum(stage.memory_bytes.get(name, 0) for name in names) / GB


def device_states_gb(prediction: Prediction) -> float:
    """Model states of the fullest device, in GB."""
    return max(states_gb(stage) for stage in prediction.stages)


def fits(prediction: Prediction) -> bool:
    """Whether each stage keeps within its device's memory less the margin."""
    return all(s.total_memory_bytes <= s.capacity_bytes for s in prediction.stages)
