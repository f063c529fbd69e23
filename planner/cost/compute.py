"""Compute time of one layer on one device.

Symbols: b = samples in a micro-batch, s = sequence length, t = tensor-parallel degree.

    time(op) = max(flops / (peak * efficiency(size)), bytes / (bandwidth * efficiency(bytes)))
               + kernels * launch
    host(layer) = kernels * what the host needs to launch one

The efficiencies are curves of the device file. A matmul's size is (m*n*k)^(1/3) of the local shard:
shards of small layers run slower per FLOP, which is what makes a high degree lose on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.division import kv_copies, kv_parameters
from profiler.device import Device
from profiler.layer_graph import Extent, LayerKind, Op, Split, TensorParallel

__all__ = ["ComputeTimes", "FusedOp", "SeparateEntries", "Shard", "Source",
           "collective_counts", "layer_compute", "op_seconds", "reduced_entries", "split_degree"]


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
    """Seconds of one layer for one micro-batch on the device, and for the host to launch them.

    source: measured at this size or between measured sizes; extrapolated from the nearest measured
        size by the analytic form; or analytic alone. What is measured holds the host's share.
    accumulate_s: adding the gradients to those of the micro-batches before; only where that is
        measured: stacks whose constants are fitted to published steps have it in those (Megatron-LM
        adds inside its weight-gradient matmuls: gradient_accumulation_fusion).
    """

    forward_s: float
    backward_s: float
    recompute_selective_s: float
    recompute_full_s: float
    source: Source = "analytic"
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0
    host_selective_s: float = 0.0
    accumulate_s: float = 0.0

    def recompute_s(self, mode: str) -> float:
        """What recompute adds to backward."""
        if mode == "none":
            return 0.0
        return self.recompute_selective_s if mode == "selective" else self.recompute_full_s

    def host_recompute_s(self, mode: str) -> float:
        """The host's share of that."""
        if mode == "none":
            return 0.0
        return self.host_selective_s if mode == "selective" else self.host_forward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOp(Op):
    """An op of a stack whose kernel takes only some shapes; for the others `otherwise` runs.

    multiple: of samples x heads of a rank. longest: sequence.
    """

    heads: int
    multiple: int
    longest: int
    otherwise: Op

    def on(self, shard: Shard) -> Op:
        """What runs on a rank's shard."""
        batches = -(-self.heads // shard.tp) * shard.micro_batch
        return self if (batches % self.multiple == 0 and shard.seq_len <= self.longest) else (
            self.otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateEntries(TensorParallel):
    """Of a stack that, without sequence parallelism, reduces the gradients that several column
    regions leave in one input each on its own: `again` are those beyond one of each entry."""

    again: tuple[Extent, ...]


def reduced_entries(parallel: TensorParallel) -> tuple[Extent, ...]:
    """What is all-reduced backward where activations are not divided along the sequence."""
    again = parallel.again if isinstance(parallel, SeparateEntries) else ()
    return parallel.entries + again


FLOAT8 = {"float8": (6, 0, 1.0), "float8_rowwise": (5, 5, 0.8)}
"""(bytes an element to cast an operand for its first matmul, for its second, rate of the matmul).

One scale for a tensor: read for its largest value, read again, written in one byte, and once more
transposed for the other matmul that it is in. One for each row: the rows of the second matmul are
the columns of the first, so that it is cast again. The matmul is CUTLASS's instead of cuBLAS's:
pytorch/torchtitan commit 7a04053 states 5,760 tokens/s of an 8B model on 8 H100 in bfloat16, 7,186
with a scale for each tensor and 6,412 for each row; of the 17 us a token between the last two the
second casts are 8, and the rest is a quarter of the time of the matmuls."""

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
    if shard.dtype in FLOAT8:
        if _runs_in_float8(op):
            return _float8_seconds(op, shard, device, degree)
        shard = replace(shard, dtype="bfloat16")
    moved = _bytes(op.elements_moved, op.bytes_moved, shard) / degree
    moved_backward = _bytes(op.backward_elements_moved, op.backward_bytes_moved, shard) / degree
    rate, work = _arithmetic(op, shard, device, degree)
    flops = op.flops.at(shard.micro_batch, shard.seq_len) * work / degree
    backward_flops = op.backward_flops.at(shard.micro_batch, shard.seq_len) * work / degree
    launch = device.kernel_launch_s
    share = device.scores_share if _is_over_scores(op) else 1.0
    return (max(flops / rate, _memory_seconds(moved, device) / share) + op.kernels * launch,
            max(backward_flops / rate, _memory_seconds(moved_backward, device) / share)
            + (op.backward_kernels * launch if backward_flops or moved_backward else 0.0))


def _is_over_scores(op: Op) -> bool:
    """A step between the products of attention that is not fused: softmax or dropout."""
    return op.kind == "attention" and op.matmul is None and op.attention is None


def _runs_in_float8(op: Op) -> bool:
    """The linear layers of the blocks; the output layer and attention stay in bfloat16."""
    return op.kind == "matmul" and op.split in ("column", "row")


def _float8_seconds(op: Op, shard: Shard, device: Device, degree: int) -> tuple[float, float]:
    """Each operand is cast first (`FLOAT8`): forward input and weight, backward the gradient, for
    its own two matmuls, and what their second matmul needs of input and weight."""
    if op.matmul is None:
        raise ValueError(f"{op.name}: a matmul without a shape")  # our own bug
    b, s = shard.micro_batch, shard.seq_len
    rows, columns, inner = (e.at(b, s) for e in (op.matmul.rows, op.matmul.columns,
                                                 op.matmul.inner))
    first, second, share = FLOAT8[shard.dtype]
    rate = _arithmetic(op, shard, device, degree)[0] * share
    inputs = (rows * inner / (degree if op.split == "row" else 1) + inner * columns / degree)
    outputs = rows * columns / (degree if op.split == "column" else 1)
    launch = device.kernel_launch_s
    again = second * inputs + (first + second) * outputs
    return (op.flops.at(b, s) / degree / rate + _memory_seconds(first * inputs, device)
            + 3 * launch,
            op.backward_flops.at(b, s) / degree / rate + _memory_seconds(again, device)
            + 3 * launch)


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
        # The products of a batch fill the device together, as one of their volume.
        volume = float(shape.rows.at(b, s) * shape.columns.at(b, s) * shape.inner.at(b, s)
                       * shape.batch.at(b, s)) / degree
        if op.kind == "attention":
            peak *= device.batched_share
        efficiency = device.matmul_efficiency
        if shard.dtype in FLOAT8 and device.float8_efficiency is not None:
            efficiency = device.float8_efficiency
        return (peak * efficiency.at(max(volume, 1) ** (1 / 3))
                * _alignment(op, shard, device, degree)), 1.0
    return peak * device.matmul_efficiency.fraction[-1], 1.0


def _alignment(op: Op, shard: Shard, device: Device, degree: int) -> float:
    """What the rows of the operands in memory leave of the efficiency: of the local columns and
    inner dimension, in bytes."""
    if op.matmul is None or device.partly_aligned == device.unaligned == 1.0:
        return 1.0
    b, s = shard.micro_batch, shard.seq_len
    columns, inner = op.matmul.columns.at(b, s), op.matmul.inner.at(b, s)
    if op.split in ("column", "vocabulary"):
        columns = -(-columns // degree)
    elif op.split == "row":
        inner = -(-inner // degree)
    width = 1 if shard.dtype in FLOAT8 else shard.compute_bytes
    if columns * width % 128 == inner * width % 128 == 0:
        return 1.0
    return (device.partly_aligned if columns * width % 16 == inner * width % 16 == 0
            else device.unaligned)


def layer_compute(kind: LayerKind, shard: Shard, device: Device) -> ComputeTimes:
    """Compute seconds of one layer (all of its ops) for one micro-batch on one rank.

    The host launches kernels ahead of the device: a layer takes the longer of both
    (`planner/cost/layer.py`).
    """
    forward = backward = selective = 0.0
    copies = kv_copies(kind, shard.tp)
    of_keys = {name.rpartition(".")[0] for name in kv_parameters(kind)}
    launched, launched_backward = collective_counts(kind, shard)
    launched_again = 0
    for each in kind.ops:
        op = each.on(shard) if isinstance(each, FusedOp) else each
        repeated = copies if op.name.removesuffix(".matmul") in of_keys else 1
        op_forward, op_backward = op_seconds(op, shard, device, repeated)
        forward += op_forward
        backward += op_backward
        launched += op.kernels
        launched_backward += op.backward_kernels
        if not _kept_by_selective(op):
            selective += op_forward
            launched_again += op.kernels
    host = device.host_kernel_s
    return ComputeTimes(forward_s=forward, backward_s=backward, recompute_selective_s=selective,
                        recompute_full_s=forward,  # it runs the forward again
                        host_forward_s=launched * host, host_backward_s=launched_backward * host,
                        host_selective_s=launched_again * host)


def collective_counts(kind: LayerKind, shard: Shard) -> tuple[int, int]:
    """Kernels that the layer's tensor-parallel collectives add forward and backward: they take
    their time on the links (`planner/cost/layer.py`), but the host launches them too."""
    if shard.tp == 1 or kind.tensor_parallel is None:
        return 0, 0
    entries, exits = len(kind.tensor_parallel.entries), len(kind.tensor_parallel.exits)
    if shard.sequence_parallel:
        return entries + exits, entries + exits
    return exits, len(reduced_entries(kind.tensor_parallel))


def _kept_by_selective(op: Op) -> bool:
    if op.kept_by_selective is not None:
        return op.kept_by_selective
    return op.kind in ("matmul", "attention")
