"""Instances with made-up measurements: nothing measured follows the analytic forms."""

from __future__ import annotations

import random
from dataclasses import replace

from planner.cost.compute import Shard, layer_compute
from profiler.layer_graph import LayerGraph
from profiler.links import LinkFit, LinkPoint, Links
from profiler.profile import FrameSeconds, LayerBytes, LayerSeconds, Profile, UpdateSeconds
from tests.planner.instances import Instance, make_instance

__all__ = ["make_links", "make_measured", "make_profile"]


def make_profile(graph: LayerGraph, instance: Instance, rng: random.Random, *,
                 device: str = "toy-0", share: float = 0.7) -> Profile:
    """Rows of some sizes, each a factor of its own from the analytic seconds."""
    size = instance.request.bytes
    rows = []
    for name, kind in graph.kinds.items():
        for tp in (1, 2):
            for micro_batch in (1, 2, 6):
                if rng.random() > share:
                    continue
                shard = Shard(micro_batch=micro_batch, seq_len=instance.request.seq_len, tp=tp,
                              dtype=size.dtype, compute_bytes=size.compute_bytes)
                times = layer_compute(kind, shard, instance.topology.hosts[0].device)
                rows.append(LayerSeconds(
                    kind=name, micro_batch=micro_batch, seq_len=instance.request.seq_len,
                    tensor_parallel=tp, forward_s=times.forward_s * rng.uniform(0.2, 5),
                    backward_s=times.backward_s * rng.uniform(0.2, 5),
                    recompute_selective_s=times.forward_s * rng.uniform(0, 2),
                    recompute_full_s=times.forward_s * rng.uniform(0, 2), spread=0.01,
                    accumulate_s=rng.choice([None, times.backward_s * rng.uniform(0, 1)]),
                    wait_s=rng.choice([None, times.forward_s * rng.uniform(0, 0.5)]),
                    num_repeats=5))
    memory = tuple(make_bytes(row, rng) for row in rows if rng.random() < share)
    stored = "float32" if size.stored_bytes == 4 else "bfloat16"
    update = UpdateSeconds(
        optimizer=instance.request.optimizer, fused=instance.request.fused_optimizer,
        stored_dtype=stored, num_parameters=10**6, update_s=10.0 ** rng.uniform(-6, -4),
        norm_s=10.0 ** rng.uniform(-6, -4), temporary_bytes=rng.choice([0, 10**6]),
        spread=0.01)
    return Profile(device=device, dtype=size.dtype, hardware="toy", versions={}, date="2000-01-01",
                   context_bytes=rng.choice([0, 10**5]), layers=tuple(rows), memory=memory,
                   updates=(update,), frames=tuple(
                       FrameSeconds(micro_batch=row.micro_batch, seq_len=row.seq_len,
                                    tensor_parallel=row.tensor_parallel,
                                    forward_s=row.forward_s * rng.uniform(0, 1))
                       for row in rows if row.kind == rows[0].kind and rng.random() < share))


def make_bytes(row: LayerSeconds, rng: random.Random) -> LayerBytes:
    """Bytes that fall with recompute, or do not."""
    kept = rng.choice([10**3, 10**5, 10**6]) * row.micro_batch // row.tensor_parallel
    return LayerBytes(
        kind=row.kind, micro_batch=row.micro_batch, seq_len=row.seq_len,
        tensor_parallel=row.tensor_parallel, saved=(), kept_bytes=kept,
        kept_selective_bytes=round(kept * rng.uniform(0, 1.2)),
        kept_full_bytes=round(kept * rng.uniform(0, 0.5)),
        forward_peak_bytes=round(kept * rng.uniform(1, 2)),
        backward_peak_bytes=round(kept * rng.uniform(1, 3)))


def make_links(rng: random.Random, share: float = 0.7) -> Links:
    """Fits of some shapes, with points that are no line and do not even rise."""
    fits = []
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "send"):
        for size in (2, 3, 4):
            for hosts in (1, 2):
                for at_once in (1, 2):
                    if rng.random() > share or size % hosts or (collective == "send" and size > 2):
                        continue
                    points = tuple(LinkPoint(
                        num_bytes=num_bytes, low_s=10.0 ** rng.uniform(-7, -4) + num_bytes * 1e-11,
                        median_s=1e-3, num_repeats=5) for num_bytes in (1024, 65536, 2**20))
                    fits.append(LinkFit(
                        collective=collective, group_size=size, num_hosts=hosts,
                        groups_at_once=at_once, latency_s=1e-6,
                        s_per_byte=10.0 ** rng.uniform(-13, -10), error=0.1, points=points))
    return Links(hardware="toy", backend="nccl", versions={}, date="2000-01-01",
                 processes_per_host=4, fits=tuple(fits), overlap_slowdown=rng.choice([None, 1.3]))


def make_measured(seed: int) -> Instance:
    """An instance of `make_instance` with a profile of its first device and measured links."""
    instance, rng = make_instance(seed), random.Random(seed)
    profile = make_profile(instance.graph, instance, rng)
    graph = replace(instance.graph, profiles=(profile,))
    topology = replace(instance.topology, links=make_links(rng)) if rng.random() < 0.8 else (
        instance.topology)
    return replace(instance, graph=graph, topology=topology)
