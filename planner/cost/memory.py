"""Memory of one layer on one rank, and of a pipeline rank at the peak of its schedule.

Symbols: P = parameters of the layer on this rank (divided by the tensor-parallel degree), d =
dp_shard degree. Bytes per parameter come from the request's precision (`planner/request.py`).

    parameters   P_trainable*stored/d + P_frozen*compute/d
    copy         P*compute            kept if not resharded, else part of the working set
    gradients    P_trainable*gradient/d, or P_trainable*reduce while they accumulate unsharded, and
                 P_trainable*beside where those of the compute dtype stay beside them
    states       P_trainable*moments*state/d
    activations  saved bytes of one micro-batch, times the micro-batches in flight; recomputed
                 layers keep their input, and with `selective` what matmuls and attention made
    working set  the largest of the layer's own at its peak: what is recomputed, temporaries,
                 gathered parameters (this unit and the prefetched next), gradients being reduced

Every layer's share is rounded up to 512 bytes, as the CUDA caching allocator rounds each block
(`kMinBlockSize` in c10/cuda/CUDACachingAllocator).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.capabilities import RecomputeMode
from planner.cost.compute import Shard, split_degree
from planner.division import kv_copies, kv_parameters
from planner.layout import Choice
from planner.request import Request
from profiler.layer_graph import LayerKind, TensorGroup

__all__ = ["BLOCK_BYTES", "ActivationMemory", "LayerMemory", "activation_memory",
           "compute_copy_bytes", "entering", "group_bytes", "layer_memory", "local_parameters",
           "optimizer_temporary_bytes", "total_memory"]

BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Bytes of one layer on one rank, each a multiple of BLOCK_BYTES.

    activation_bytes is per micro-batch in flight; working_set_bytes is needed once at a time by
    whichever layer is at work; optimizer_temporary_bytes only in the optimizer step.
    """

    parameter_bytes: int
    compute_copy_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    buffer_bytes: int
    activation_bytes: int
    working_set_bytes: int
    optimizer_temporary_bytes: int

    @property
    def static_bytes(self) -> int:
        """What is held through the whole step."""
        return (self.parameter_bytes + self.compute_copy_bytes + self.gradient_bytes
                + self.optimizer_state_bytes + self.buffer_bytes)


def _blocks(num_bytes: float) -> int:
    return -(-int(num_bytes) // BLOCK_BYTES) * BLOCK_BYTES


def local_parameters(kind: LayerKind, tp: int, without: frozenset[str] = frozenset()
                     ) -> tuple[int, int]:
    """(trainable, frozen) parameters held by one tensor-parallel rank; `without` names are left
    out.

    A dimension that the degree does not divide counts as padded: ceil(size / tp). Where there are
    fewer KV heads than ranks, each rank holds their parameters whole.
    """
    trainable = frozen = 0
    whole = kv_parameters(kind) if kv_copies(kind, tp) > 1 else ()
    for parameter in kind.parameters:
        if parameter.name in without:
            continue
        numel = parameter.numel
        if (parameter.split in ("column", "row", "vocabulary") and parameter.name not in whole
                and parameter.split_dim is not None):
            size = parameter.shape[parameter.split_dim]
            numel = numel // max(size, 1) * -(-size // tp)
        if parameter.trainable:
            trainable += numel
        else:
            frozen += numel
    return trainable, frozen


def entering(kind: LayerKind, recompute: RecomputeMode, shard: Shard) -> tuple[TensorGroup, ...]:
    """What a layer is given and keeps: where autograd does, or where a checkpoint does."""
    if recompute != "none" and kind.inputs:
        return kind.inputs
    return tuple(g for g in kind.saved if g.is_given(shard.compute_bytes) and not g.is_outside)


def group_bytes(groups: Iterable[TensorGroup], shard: Shard) -> int:
    """Bytes of one rank's share of some tensors."""
    total = 0
    for group in groups:
        degree = split_degree(group.split, shard.tp, shard.sequence_parallel)
        whole = group.bytes_at(shard.micro_batch, shard.seq_len, shard.compute_bytes)
        total += -(-whole // degree)
    return total


def _kv_bytes(kind: LayerKind, shard: Shard) -> int:
    """What keys and values need beyond an even share, where several ranks compute each KV head."""
    copies = kv_copies(kind, shard.tp)
    if copies == 1:
        return 0
    elements = sum(2 * op.attention.kv_heads * op.attention.head_dim
                   * op.attention.keys.at(1, shard.seq_len)
                   for op in kind.ops if op.attention is not None)
    whole = elements * shard.micro_batch * shard.compute_bytes
    return -(-whole * (copies - 1) // shard.tp)


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """Bytes of one layer that the micro-batch makes: kept from forward to backward, and needed
    while it is at work."""

    saved_bytes: int
    working_set_bytes: int


def activation_memory(kind: LayerKind, recompute: RecomputeMode, shard: Shard) -> ActivationMemory:
    """What a layer keeps and works with under one way to recompute: a checkpoint keeps what enters
    the layer (`LayerKind.inputs`) whether or not autograd does."""
    more = _kv_bytes(kind, shard)
    everything = group_bytes(kind.saved, shard) + more
    if recompute == "none":
        saved_bytes, dropped_bytes = everything, 0
    else:
        selective = recompute == "selective"
        kept = group_bytes([g for g in kind.saved if g.is_outside or (
            selective and g.kept_by_selective and not g.is_input)], shard)
        kept += more if selective else 0
        extra = group_bytes(kind.kept_only_by_selective, shard) if selective else 0
        entered = group_bytes(entering(kind, recompute, shard), shard)
        saved_bytes, dropped_bytes = kept + extra + entered, everything - kept
    return ActivationMemory(saved_bytes, max(
        group_bytes(kind.forward_working_set, shard),
        group_bytes(kind.backward_working_set, shard) + more + dropped_bytes))


def layer_memory(kind: LayerKind, choice: Choice, shard: Shard, *, request: Request,
                 dp_shard: int, unsharded_gradients: bool, copies_replicas: bool = False,
                 without: frozenset[str] = frozenset()) -> LayerMemory:
    """Bytes of one layer under one choice.

    Args:
        copies_replicas: see `total_memory`.
        shard: with `tp` = 1 where the layer is held whole.
        unsharded_gradients: gradients accumulate whole over the micro-batches of a step.
        without: parameters charged elsewhere (tied ones that another layer holds).
    """
    return total_memory(
        activation_memory(kind, choice.recompute, shard),
        local_parameters(kind, shard.tp, without), kind.buffer_bytes, choice, request=request,
        dp_shard=dp_shard, unsharded_gradients=unsharded_gradients,
        copies_replicas=copies_replicas)


def total_memory(activations: ActivationMemory, parameters: tuple[int, int], buffer_bytes: int,
                 choice: Choice, *, request: Request, dp_shard: int, unsharded_gradients: bool,
                 copies_replicas: bool = False, temporary_bytes: float | None = None
                 ) -> LayerMemory:
    """As `layer_memory`, from its parts.

    Args:
        parameters: (trainable, frozen) of this rank.
        copies_replicas: parameters that are not sharded are computed with as copies all the same,
            as FSDP2 does over a group of one (`_fsdp_param_group.py`, `wait_for_unshard`).
        temporary_bytes: of the optimizer step for one parameter, where that is measured.
    """
    size = request.bytes
    trainable, frozen = parameters
    gathered = (trainable + frozen) * size.compute_bytes
    resharded = choice.reshard and dp_shard > 1
    working = activations.working_set_bytes
    if resharded:
        working += 2 * gathered  # this unit's parameters and the prefetched next ones
    if dp_shard > 1 and not unsharded_gradients:
        # This unit's gradient in the compute dtype and its copy in the dtype of the reduction.
        working += trainable * (size.compute_bytes + size.reduce_bytes)
    gradient = (trainable * size.reduce_bytes if unsharded_gradients
                else trainable * size.gradient_bytes / dp_shard) + trainable * size.beside_bytes
    temporary = trainable / dp_shard * optimizer_temporary_bytes(request, temporary_bytes)
    return LayerMemory(
        parameter_bytes=_blocks((trainable * size.stored_bytes + frozen * size.compute_bytes)
                                / dp_shard),
        compute_copy_bytes=_blocks(0 if resharded else compute_copy_bytes(
            parameters, request, copies_all=dp_shard > 1 or copies_replicas)),
        gradient_bytes=_blocks(gradient),
        optimizer_state_bytes=_blocks(trainable * request.num_moments * size.state_bytes
                                      / dp_shard),
        buffer_bytes=_blocks(buffer_bytes),
        activation_bytes=_blocks(activations.saved_bytes),
        working_set_bytes=_blocks(working),
        optimizer_temporary_bytes=_blocks(temporary),
    )


def compute_copy_bytes(parameters: tuple[int, int], request: Request, *, copies_all: bool) -> int:
    """What layers compute with besides what is stored: copies in the compute dtype.

    Args:
        parameters: (trainable, frozen) of this rank.
        copies_all: whatever the precision, since they are gathered or copied; else trainable ones
            alone, where the precision has such copies (frozen ones are stored as they are used).
    """
    trainable, frozen = parameters
    size = request.bytes
    if copies_all:
        return (trainable + frozen) * size.compute_bytes
    return trainable * size.compute_bytes if size.has_compute_copy else 0


def optimizer_temporary_bytes(request: Request, measured: float | None = None) -> float:
    """What the optimizer step allocates for one parameter: nothing if it is fused, else a copy."""
    if measured is not None:
        return measured
    return 0 if request.fused_optimizer else request.bytes.stored_bytes
