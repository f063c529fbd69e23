"""Small made-up models and clusters, for tests that compare the search with brute force."""

from __future__ import annotations

import random

from planner.request import Request
from planner.topology import HostGroup, Link, Topology
from profiler.device import Curve, Device
from profiler.layer_graph import (
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

SEQ_LEN = 64


def per_token(count: int) -> Extent:
    return Extent(per_sample=(0, count, 0))


def make_device(memory_bytes: int, *, speed: float = 1.0, name: str = "toy") -> Device:
    flat = Curve(size=(1.0,), fraction=(0.5,))
    return Device(
        name=name, memory_bytes=memory_bytes, memory_bandwidth_bytes_per_s=1e12 * speed,
        peak_flops_per_s={"bfloat16": 1e14 * speed, "float16": 1e14 * speed,
                          "float32": 5e13 * speed},
        matmul_efficiency=Curve(size=(64.0, 4096.0), fraction=(0.2, 0.7)),
        attention_efficiency=flat, memory_efficiency=flat, kernel_launch_s=2e-6,
        context_bytes=2**20, communicator_bytes=2**18, overlap_slowdown=1.1,
        sources={"all": "made up for tests"})


def make_topology(num_hosts: int, per_host: int, memory_bytes: int, *, speeds: tuple[float, ...]
                  = (1.0,)) -> Topology:
    """Hosts of equal size; with several speeds, one host group of `num_hosts` hosts for each."""
    return Topology(name="toy", hosts=tuple(
        HostGroup(count=num_hosts, devices_per_host=per_host,
                  device=make_device(memory_bytes, speed=speed, name=f"toy-{index}"),
                  device_link=Link(bandwidth_bytes_per_s=1e11, latency_s=2e-6),
                  network_card=Link(bandwidth_bytes_per_s=1e10, latency_s=5e-6),
                  cards_per_host=1)
        for index, speed in enumerate(speeds)))


def make_kind(rng: random.Random, *, splittable: bool = True) -> LayerKind:
    """A layer of one column and one row matmul and some pointwise work."""
    width = rng.choice([256, 512, 1024])
    inner = width * rng.choice([1, 2, 4])
    def matmul(name: str, split: str, columns: int, depth: int) -> Op:
        flops = per_token(2 * columns * depth)
        return Op(name=name, kind="matmul", split=split, flops=flops,  # type: ignore[arg-type]
                  backward_flops=flops + flops, elements_moved=per_token(columns + depth),
                  backward_elements_moved=per_token(2 * (columns + depth)),
                  matmul=MatmulShape(rows=per_token(1), columns=Extent(fixed=(columns, 0, 0)),
                                     inner=Extent(fixed=(depth, 0, 0))))
    pointwise = Op(name="act", kind="pointwise", split="feature",
                   elements_moved=per_token(rng.choice([2, 20]) * inner),
                   backward_elements_moved=per_token(3 * inner))
    divided = splittable
    return LayerKind(
        parameters=(
            Parameter(name="up", shape=(inner, width), split="column" if divided else "replicated",
                      split_dim=0, trainable=rng.random() < 0.9),
            Parameter(name="down", shape=(width, inner), split="row" if divided else "replicated",
                      split_dim=1),
            Parameter(name="norm", shape=(width,))),
        ops=(matmul("up", "column" if divided else "replicated", inner, width), pointwise,
             matmul("down", "row" if divided else "replicated", width, inner)),
        saved=(
            TensorGroup(name="input", elements=per_token(width), split="sequence", is_input=True),
            TensorGroup(name="up", elements=per_token(inner), split="feature",
                        kept_by_selective=True),
            TensorGroup(name="act", elements=per_token(rng.choice([1, 6]) * inner),
                        split="feature")),
        backward_working_set=(
            TensorGroup(name="grad", elements=per_token(inner), split="feature"),),
        tensor_parallel=TensorParallel(divides={"ffn": inner, "heads": rng.choice([2, 4, 8])},
                                       entries=(per_token(width),), exits=(per_token(width),))
        if divided else None)


def make_graph(rng: random.Random, num_layers: int, *, num_kinds: int, skips: bool = False,
               tied: bool = False) -> LayerGraph:
    """A chain of layers drawn from a few kinds, maybe with skip connections and a tie."""
    kinds = {f"kind{i}": make_kind(rng, splittable=rng.random() < 0.8) for i in range(num_kinds)}
    layers: list[Layer] = []
    while len(layers) < num_layers:
        kind = rng.choice(sorted(kinds))
        for _ in range(min(rng.randint(1, 4), num_layers - len(layers))):
            layers.append(Layer(name=f"layers.{len(layers)}", kind=kind))
    edges = [Edge(source=i, target=i + 1, tensor="out", elements=per_token(rng.choice([256, 512])))
             for i in range(num_layers - 1)]
    if skips and num_layers > 3:
        source = rng.randrange(num_layers - 2)
        edges.append(Edge(source=source, target=rng.randrange(source + 2, num_layers),
                          tensor="skip", elements=per_token(512)))
    ties: tuple[Tie, ...] = ()
    if tied and num_layers > 1:
        last = num_layers - 1
        same = [i for i in range(1, num_layers)
                if kinds[layers[i].kind].parameters[1].shape
                == kinds[layers[0].kind].parameters[1].shape
                and layers[i].kind == layers[0].kind]
        if same:
            last = same[-1]
            ties = (Tie(places=((0, "down"), (last, "down"))),)
    return LayerGraph(name="toy", kinds=kinds, layers=tuple(layers), edges=tuple(edges), ties=ties)


def make_request(rng: random.Random) -> Request:
    return Request(global_batch=rng.choice([2, 4, 6, 8]), seq_len=SEQ_LEN,
                   memory_margin=0.0, fused_optimizer=rng.random() < 0.7,
                   precision=rng.choice(["bf16-mixed", "bf16", "fp32"]))  # type: ignore[arg-type]
