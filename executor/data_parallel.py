"""Data parallelism of one stage by FSDP2: sharded (ZeRO-3 or ZeRO-2 layer by layer), replicated, or
both.

    dp_shard > 1                     fully_shard, each layer with its own reshard_after_forward
    dp_shard > 1, dp_replicate > 1   the same over a 2-D mesh (HSDP)
    dp_replicate > 1 alone           replicate_with_fsdp.replicate: gradients all-reduced beside
    backward neither, mixed precision         fully_shard over one rank, for its compute copies

The DDP-based `_composable.replicate` is not used: within a pipeline it trains on wrong gradients,
silently. Layers that share a parameter stay in the stage's outermost unit: in a unit of its own a
shared table would be torn from its other place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from executor.mesh import ParallelMesh
from planner.layout import Choice
from planner.request import Precision

__all__ = ["compute_dtype", "is_wrapped", "prepare_micro_batch", "shard_stage", "stored_dtype"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BYTES = {4: torch.float32, 2: torch.bfloat16}


def compute_dtype(precision: Precision) -> torch.dtype | None:
    """What layers compute in, where that is not what parameters are stored in."""
    return _DTYPES[precision.dtype] if precision.has_compute_copy else None


def stored_dtype(precision: Precision) -> torch.dtype:
    """What parameters are stored in."""
    return _BYTES[precision.stored_bytes]


def _policy(precision: Precision, *, cast_inputs: bool) -> MixedPrecisionPolicy:
    dtype = compute_dtype(precision)
    if dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=_BYTES[precision.reduce_bytes],
                                cast_forward_inputs=cast_inputs)


def shard_stage(stage: nn.Module, layers: Sequence[tuple[nn.Module, Choice]], mesh: ParallelMesh,
                precision: Precision) -> None:
    """Apply data parallelism to a stage and each of its layers."""
    dp_mesh = mesh.data_parallel_mesh(precision.has_compute_copy)
    if dp_mesh is None:
        return
    sharded = mesh.spec.dp_shard > 1 or mesh.spec.dp_replicate == 1
    modules: dict[int, tuple[nn.Module, Choice]] = {id(m): (m, c) for m, c in layers}
    owners = Counter(id(p) for module, _ in modules.values() for p in module.parameters())
    for module, choice in modules.values():
        parameters = list(module.parameters())
        if not parameters or any(owners[id(p)] > 1 for p in parameters):
            continue
        _apply(module, sharded, dp_mesh, _policy(precision, cast_inputs=True), choice.reshard)
    # the loss is computed inside the stage, and targets must not be cast: the stage casts its own
    # inputs
    _apply(stage, sharded, dp_mesh, _policy(precision, cast_inputs=False), False)


def _apply(module: nn.Module, sharded: bool, dp_mesh: Any, policy: MixedPrecisionPolicy,
           reshard: bool) -> None:
    if sharded:
        fully_shard(module, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=reshard)
    else:
        replicate(module, mesh=dp_mesh, mp_policy=policy)


def is_wrapped(stage: nn.Module) -> bool:
    """Whether FSDP2 manages the stage."""
    return isinstance(stage, FSDPModule)


def prepare_micro_batch(stage: nn.Module, layers: Sequence[tuple[nn.Module, Choice]],
                        mesh: ParallelMesh, *, is_last: bool, sync_each: bool) -> None:
    """Say what the coming backward does with gradients and gathered parameters (no pipeline).

    Gradients are reduced after the last micro-batch, or after each (then between the shards, and
    between replicas after the last). Layers that do not reshard stay gathered until the last.
    """
    if not isinstance(stage, FSDPModule):
        return
    stage.set_is_last_backward(is_last)
    stage.set_requires_gradient_sync(is_last or sync_each)
    if sync_each and mesh.spec.dp_shard > 1 and mesh.spec.dp_replicate > 1:
        stage.set_requires_all_reduce(is_last)
    for module, choice in layers:
        if isinstance(module, FSDPModule) and not choice.reshard:
            module.set_reshard_after_backward(is_last, recurse=False)
