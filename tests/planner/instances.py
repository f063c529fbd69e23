"""Small made-up models and clusters, for tests that compare the search with brute force.

`make_instance(seed)` draws one from the whole range: chains of unlike layers and models of equal
blocks with layers before and after; skips, ties, frozen parameters, layers that cannot be divided;
one or two hosts, or two groups of unlike hosts; links from slow to fast; memory from too little to
plenty.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

from planner.request import Request
from planner.topology import HostGroup, Link, Topology
from profiler.device import Curve, Device
from profiler.layer_graph import (
    AttentionShape,
    Edge,
    Extent,
    Layer,
    LayerGraph,
    LayerKind,
    MatmulShape,
    Op,
    Parameter,
    TensorGroup,
    TensorParallel,
    Tie,
)

__all__ = ["Instance", "make_device", "make_graph", "make_instance", "make_kind", "make_request",
           "make_topology", "per_token"]

SEQ_LEN = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One question to the planner."""

    graph: LayerGraph
    topology: Topology
    request: Request


def per_token(count: int) -> Extent:
    return Extent(per_sample=(0, count, 0))


def fixed(count: int) -> Extent:
    return Extent(fixed=(count, 0, 0))


# --- clusters


def make_device(memory_bytes: int, *, speed: float = 1.0, name: str = "toy",
                **changes: Any) -> Device:
    flat = Curve(size=(1.0,), fraction=(0.5,))
    device = Device(
        name=name, memory_bytes=memory_bytes, memory_bandwidth_bytes_per_s=1e12 * speed,
        peak_flops_per_s={"bfloat16": 1e14 * speed, "float16": 1e14 * speed,
                          "float32": 5e13 * speed},
        matmul_efficiency=Curve(size=(64.0, 4096.0), fraction=(0.2, 0.7)),
        attention_efficiency=flat, memory_efficiency=flat, kernel_launch_s=2e-6,
        context_bytes=2**20, communicator_bytes=2**18, overlap_slowdown=1.1,
        sources={"all": "made up for tests"})
    return replace(device, **changes)


def make_topology(num_hosts: int, per_host: int, memory_bytes: int, *,
                  speeds: tuple[float, ...] = (1.0,), rng: random.Random | None = None) -> Topology:
    """Hosts of equal size; with several speeds, one host group of `num_hosts` hosts for each.

    rng: draws the links, and the memory and latencies of every group after the first.
    """
    rng = rng or random.Random(0)
    slowdown = rng.choice([1.1, 1.0, 1.1, 1.5, 2.5])
    launch_s = rng.choice([2e-6, 0.0, 2e-7])
    groups = []
    for index, speed in enumerate(speeds):
        link = Link(bandwidth_bytes_per_s=rng.choice([1e11, 1e10, 1e12]),
                    latency_s=rng.choice([2e-6, 0.0, 1e-7]),
                    aggregate_bytes_per_s=rng.choice([None, None, 5e10]))
        card = Link(bandwidth_bytes_per_s=rng.choice([1e10, 2e9, 1e11, 1e12]),
                    latency_s=rng.choice([5e-6, 0.0, 1e-6]))
        device = make_device(int(memory_bytes * (1 if index == 0 else rng.choice([0.5, 1, 2]))),
                             speed=speed, name=f"toy-{index}", overlap_slowdown=slowdown,
                             kernel_launch_s=launch_s)
        groups.append(HostGroup(count=num_hosts, devices_per_host=per_host, device=device,
                                device_link=link, network_card=card,
                                cards_per_host=rng.choice([1, 1, per_host, 4])))
    return Topology(name="toy", hosts=tuple(groups))


# --- models


def _matmul(name: str, split: str, columns: int, depth: int) -> Op:
    flops = per_token(2 * columns * depth)
    return Op(name=name, kind="matmul", split=split, flops=flops,  # type: ignore[arg-type]
              backward_flops=flops + flops, elements_moved=per_token(columns + depth),
              backward_elements_moved=per_token(2 * (columns + depth)),
              matmul=MatmulShape(rows=per_token(1), columns=fixed(columns), inner=fixed(depth)))


def _attention(width: int) -> Op:
    flops = Extent(per_sample=(0, 0, 4 * width))
    return Op(name="attention", kind="attention", split="heads", flops=flops,
              backward_flops=flops + flops, elements_moved=per_token(4 * width),
              backward_elements_moved=per_token(8 * width),
              attention=AttentionShape(heads=8, kv_heads=8, head_dim=width // 8,
                                       queries=per_token(1), keys=per_token(1), causal=True))


def make_kind(rng: random.Random, *, splittable: bool = True, frozen: bool = False) -> LayerKind:
    """A layer of one column and one row matmul, perhaps attention, and some pointwise work."""
    width = rng.choice([192, 384, 768])
    inner = width * rng.choice([1, 2, 4])
    column, row = ("column", "row") if splittable else ("replicated", "replicated")
    pointwise = Op(name="act", kind="pointwise", split="feature",
                   elements_moved=per_token(rng.choice([2, 20, 100]) * inner),
                   backward_elements_moved=per_token(3 * inner))
    ops = [_matmul("up", column, inner, width), pointwise, _matmul("down", row, width, inner)]
    if rng.random() < 0.3:
        ops.append(_attention(width))
    return LayerKind(
        parameters=(
            Parameter(name="up", shape=(inner, width), split=column,  # type: ignore[arg-type]
                      split_dim=0, trainable=not frozen and rng.random() < 0.9),
            Parameter(name="down", shape=(width, inner), split=row,  # type: ignore[arg-type]
                      split_dim=1, trainable=not frozen),
            Parameter(name="norm", shape=(width,), trainable=not frozen)),
        buffer_bytes=rng.choice([0, 0, 1000]), ops=tuple(ops),
        saved=(
            TensorGroup(name="input", elements=per_token(width), split="sequence", is_input=True),
            TensorGroup(name="up", elements=per_token(inner), split="feature",
                        kept_by_selective=True),
            TensorGroup(name="act", elements=per_token(rng.choice([1, 6, 30]) * inner),
                        split="feature"),
            TensorGroup(name="mask", elements=per_token(inner), split="sequence",
                        bytes_per_element=1)),
        inputs=(TensorGroup(name="input", elements=per_token(width), split="sequence",
                            is_input=True),),
        kept_only_by_selective=() if rng.random() < 0.8 else (
            TensorGroup(name="scores", elements=per_token(inner), split="feature"),),
        backward_working_set=(
            TensorGroup(name="grad", elements=per_token(rng.choice([1, 8]) * inner),
                        split="feature"),),
        tensor_parallel=TensorParallel(
            divides={"ffn": inner, "heads": rng.choice([2, 4, 6, 8, 12])},
            entries=(per_token(width),), exits=(per_token(width),)) if splittable else None)


def make_vocabulary(rng: random.Random) -> LayerKind:
    """An embedding or a head, divided by a vocabulary that no degree divides."""
    width, size = rng.choice([192, 384]), rng.choice([1009, 4001])
    return LayerKind(
        parameters=(Parameter(name="down", shape=(size, width), split="vocabulary", split_dim=0),),
        ops=(_matmul("head", "vocabulary", size, width),),
        saved=(TensorGroup(name="input", elements=per_token(width), split="sequence",
                           is_input=True),
               TensorGroup(name="logits", elements=per_token(size), split="vocabulary",
                           bytes_per_element=4)),
        inputs=(TensorGroup(name="input", elements=per_token(width), split="sequence",
                            is_input=True),),
        backward_working_set=(TensorGroup(name="grad", elements=per_token(size),
                                          split="vocabulary"),),
        tensor_parallel=TensorParallel(divides={"vocabulary": size}, entries=(per_token(width),)))


def make_graph(rng: random.Random, num_layers: int, *, num_kinds: int = 2, skips: bool = False,
               tied: bool = False, even_edges: bool = False) -> LayerGraph:
    """A chain of layers drawn from a few kinds, maybe with a skip connection and a tie."""
    kinds = {f"kind{i}": make_kind(rng, splittable=rng.random() < 0.8, frozen=rng.random() < 0.15)
             for i in range(num_kinds)}
    names: list[str] = []
    while len(names) < num_layers:
        names += [rng.choice(sorted(kinds))] * min(rng.randint(1, 4), num_layers - len(names))
    return _graph(rng, kinds, names, skips=skips, tied=tied, even_edges=even_edges)


def make_blocks(rng: random.Random, before: int, blocks: int, after: int, *, skips: bool = False,
                tied: bool = False, even_edges: bool = True) -> LayerGraph:
    """Equal blocks between a few layers of other kinds, as most models are."""
    kinds = {"block": make_kind(rng, frozen=rng.random() < 0.1)}
    names = []
    for index in range(before + after):
        kinds[f"other{index}"] = (make_vocabulary(rng) if rng.random() < 0.5 else
                                  make_kind(rng, splittable=rng.random() < 0.5))
        names.append(f"other{index}")
    if tied and before and after:
        names[-1] = names[0]
    return _graph(rng, kinds, [*names[:before], *["block"] * blocks, *names[before:]],
                  skips=skips, tied=tied, even_edges=even_edges)


def _graph(rng: random.Random, kinds: dict[str, LayerKind], names: list[str], *, skips: bool,
           tied: bool, even_edges: bool) -> LayerGraph:
    count = len(names)
    width = rng.choice([192, 768])
    edges = [Edge(source=i, target=i + 1, tensor="out",
                  elements=per_token(width if even_edges else rng.choice([192, 768])))
             for i in range(count - 1)]
    if skips and count > 3:
        source = rng.randrange(count - 2)
        edges.append(Edge(source=source, target=rng.randrange(source + 2, count), tensor="skip",
                          elements=per_token(768), has_gradient=rng.random() < 0.7))
    same = [i for i in range(1, count) if names[i] == names[0]]
    ties = (Tie(places=((0, "down"), (same[-1], "down"))),) if tied and same else ()
    return LayerGraph(
        name="toy", kinds={name: kinds[name] for name in dict.fromkeys(names)},
        layers=tuple(Layer(name=f"layers.{i}", kind=name) for i, name in enumerate(names)),
        edges=tuple(edges), ties=ties, sample=rng.choice(["tokens"] * 4 + ["features"]))


# --- requests


def make_request(rng: random.Random, **changes: Any) -> Request:
    return Request(**{
        "global_batch": rng.choice([1, 2, 3, 4, 4, 6, 8, 8, 12]), "seq_len": SEQ_LEN,
        "memory_margin": 0.0, "fused_optimizer": rng.random() < 0.7,
        "precision": rng.choice(["bf16-mixed", "bf16", "fp32"]),
        "optimizer": rng.choice(["adamw", "adamw", "lion", "sgd"])} | changes)


def whole_bytes(graph: LayerGraph, request: Request) -> int:
    """About what the model needs on one device, with the activations of one sample."""
    size = request.bytes
    each = (size.stored_bytes + size.compute_bytes + size.gradient_bytes
            + request.num_moments * size.state_bytes)
    total = 0
    for index in range(len(graph.layers)):
        kind = graph.kind_of(index)
        total += sum(p.numel * (each if p.trainable else size.compute_bytes)
                     for p in kind.parameters)
        total += sum(g.bytes_at(1, request.seq_len, size.compute_bytes) for g in kind.saved)
    return total


def _demands(rng: random.Random, number: int) -> dict[str, Any]:
    """Some of the choices that a request may fix."""
    offers: dict[str, list[Any]] = {
        "recompute": ["none", "selective", "full"], "schedule": ["interleaved", "1f1b", "gpipe"],
        "pp": [1, 2, 2, 3, 4], "tp": [1, 2], "dp_shard": [1, 2], "dp_replicate": [1, 2],
        "micro_batch": [1, 2], "use_all_devices": [True]}
    return {name: rng.choice(offers[name]) for name in rng.sample(sorted(offers), number)}


def make_instance(seed: int) -> Instance:
    """The instance of a seed: anything, or one for which a rarer choice is worth while."""
    rng = random.Random(seed)
    kind = rng.random()
    if kind < 0.12:
        return _for_interleaving(rng)
    if kind < 0.2:
        return _for_sharded_gradients(rng)
    return _anything(rng)


def _anything(rng: random.Random) -> Instance:
    """The larger its model and its cluster, the more is demanded."""
    options: dict[str, Any] = {"skips": rng.random() < 0.25, "tied": rng.random() < 0.3}
    if rng.random() < 0.5:
        num_layers = rng.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8])
        graph = make_graph(rng, num_layers, num_kinds=rng.randint(1, 3),
                           even_edges=rng.random() < 0.5, **options)
    else:
        before, after = rng.choice([0, 1, 1, 2]), rng.choice([0, 1, 1, 2])
        graph = make_blocks(rng, before, rng.choice([2, 3, 4, 4, 4, 6]), after,
                            even_edges=rng.random() < 0.7, **options)
    num_layers = len(graph.layers)
    hosts, per_host = rng.choice([(1, 1), (1, 2), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (2, 2)])
    if rng.random() < 0.15:
        hosts, per_host = rng.choice([(1, 8), (2, 4), (1, 6), (2, 3), (5, 1)])
    speeds = (1.0,)
    if rng.random() < 0.2:
        speeds, hosts = (1.0, rng.choice([0.3, 0.7, 1.0])), 1
        per_host = min(per_host, 2)
    devices = hosts * per_host * len(speeds)
    freedom = num_layers * (devices - 1)
    demands = _demands(rng, rng.choice([0, 0, 0, 1]) + (freedom > 12) + (freedom > 24))
    if freedom > 15:
        demands["recompute"] = rng.choice(["none", "selective", "full"])
    request = make_request(rng, **demands)
    share = exp(rng.uniform(log(0.6), log(4.0))) / devices
    memory = 2**21 + int(whole_bytes(graph, request) * share)
    topology = make_topology(hosts, per_host, memory, speeds=speeds, rng=rng)
    return Instance(graph=graph, topology=topology, request=request)


def _for_interleaving(rng: random.Random) -> Instance:
    """Few micro-batches on stages that can have equally many blocks, and fast links."""
    pp = rng.choice([2, 2, 3, 4])
    graph = make_blocks(rng, 1, 2 * pp, rng.choice([0, 0, 1]))
    request = make_request(rng, pp=pp, micro_batch=1, dp_shard=1, dp_replicate=1, tp=1,
                           global_batch=pp * rng.choice([1, 1, 2]))
    memory = 2**21 + int(whole_bytes(graph, request) * rng.uniform(0.7, 5.0) / pp)
    topology = make_topology(1, pp, memory)  # 100 GB/s
    return Instance(graph=graph, topology=topology, request=request)


def _for_sharded_gradients(rng: random.Random) -> Instance:
    """Many layers whose gradients are large beside what is kept sharded."""
    graph = make_blocks(rng, rng.choice([0, 1]), rng.choice([5, 6]), rng.choice([0, 1]))
    request = make_request(rng, pp=1, dp_shard=4, dp_replicate=1, tp=1, micro_batch=1,
                           global_batch=8, precision="bf16-mixed", optimizer="sgd",
                           fused_optimizer=True)
    memory = 2**21 + int(whole_bytes(graph, request) * rng.uniform(0.3, 0.8))
    topology = make_topology(1, 4, memory)
    return Instance(graph=graph, topology=topology, request=request)
