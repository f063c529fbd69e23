"""Compute time of one layer on one device.

Symbols: b = samples in a micro-batch, s = sequence length, t = tensor-parallel degree.

    time(op) = max(flops / (peak * efficiency(size)), bytes / (bandwidth * efficiency(bytes)))
               + kernels * launch

The efficiencies are curves of the device file. A matmul's size is (m*n*k)^(1/3) of the local shard:
shards of small layers run slower per FLOP, which is what makes a high degree lose on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.division import kv_copies, kv_parameters
from profiler.device import Device
from profiler.layer_graph import Extent, LayerKind, Op, Split

__all__ = ["ComputeTimes", "Shard", "Source", "layer_compute", "op_seconds", "split_degree"]


Source = Literal["measured", "extrapolated", "analytic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which share of a layer one rank computes: micro-batch, length, degree, element size."""

    micro_batch: int
    seq_len: int
    tp: int = 1
    sequence_parallel: bool = True
    dtype: str = "bfloat16"
    compute_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """Seconds of one layer for one micro-batch; recompute is what is added to backward.

    source: measured at this size or between measured sizes; extrapolated from the nearest measured
        size by the analytic form; or analytic alone.
    """

    forward_s: float
    backward_s: float
    recompute_selective_s: float
    recompute_full_s: float
    source: Source = "analytic"


_DIVIDED: frozenset[Split] = frozenset({"column", "row", "heads", "feature", "vocabulary"})


def split_degree(split: Split, tp: int, sequence_parallel: bool) -> int:
    """Into how many parts a quantity of this split is divided over a group of `tp` ranks."""
    if split in _DIVIDED or (split == "sequence" and sequence_parallel):
        return tp
    return 1


def op_seconds(op: Op, shard: Shard, device: Device, copies: int = 1) -> tuple[float, float]:
    """(forward, backward) seconds of one op on one rank's shard; `copies` ranks do each part."""
    degree = split_degree(op.split, shard.tp, shard.sequence_parallel)
    degree = max(1, degree // copies)
    moved = _bytes(op.elements_moved, op.bytes_moved, shard) / degree
    moved_backward = _bytes(op.backward_elements_moved, op.backward_bytes_moved, shard) / degree
    rate, work = _arithmetic(op, shard, device, degree)
    flops = op.flops.at(shard.micro_batch, shard.seq_len) * work / degree
    backward_flops = op.backward_flops.at(shard.micro_batch, shard.seq_len) * work / degree
    launch = device.kernel_launch_s
    return (max(flops / rate, _memory_seconds(moved, device)) + op.kernels * launch,
            max(backward_flops / rate, _memory_seconds(moved_backward, device))
            + (op.backward_kernels * launch if backward_flops or moved_backward else 0.0))


def _bytes(elements: Extent, fixed: Extent, shard: Shard) -> int:
    return (elements.at(shard.micro_batch, shard.seq_len) * shard.compute_bytes
            + fixed.at(shard.micro_batch, shard.seq_len))


def _memory_seconds(moved_bytes: float, device: Device) -> float:
    if moved_bytes <= 0:
        return 0.0
    efficiency = device.memory_efficiency.at(moved_bytes)
    return moved_bytes / (device.memory_bandwidth_bytes_per_s * efficiency)


def _arithmetic(op: Op, shard: Shard, device: Device, degree: int) -> tuple[float, float]:
    """(FLOP/s that the op reaches, share of its counted FLOPs that the kernel really does)."""
    peak = device.peak(shard.dtype)
    b, s = shard.micro_batch, shard.seq_len
    if op.attention is not None:
        # A causal kernel skips the masked half of the square: (s + 1) / 2s of it remains.
        keys = max(op.attention.keys.at(1, s), 1)
        work = (keys + 1) / (2 * keys) if op.attention.causal else 1.0
        return peak * device.attention_efficiency.at(keys), work
    if op.matmul is not None:
        shape = op.matmul
        volume = float(shape.rows.at(b, s) * shape.columns.at(b, s) * shape.inner.at(b, s))
        # A batch of heads is divided over the group; a lone matmul is itself made smaller.
        if op.split != "heads":
            volume /= degree
        return peak * device.matmul_efficiency.at(max(volume, 1) ** (1 / 3)), 1.0
    return peak * device.matmul_efficiency.fraction[-1], 1.0


def layer_compute(kind: LayerKind, shard: Shard, device: Device) -> ComputeTimes:
    """Compute seconds of one layer (all of its ops) for one micro-batch on one rank."""
    forward = backward = selective = 0.0
    copies = kv_copies(kind, shard.tp)
    of_keys = {name.rpartition(".")[0] for name in kv_parameters(kind)}
    for op in kind.ops:
        repeated = copies if op.name.removesuffix(".matmul") in of_keys else 1
        op_forward, op_backward = op_seconds(op, shard, device, repeated)
        forward += op_forward
        backward += op_backward
        if op.kind not in ("matmul", "attention", "convolution"):
            selective += op_forward  # selective recompute keeps what the others made
    return ComputeTimes(forward_s=forward, backward_s=backward, recompute_selective_s=selective,
                        recompute_full_s=forward)  # it runs the forward again
