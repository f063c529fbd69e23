"""The Request: everything about the training run that the planner may not choose."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from planner.capabilities import PrecisionName
from planner.stacks import default_stack, load_stack
from profiler.documents import STRICT
from profiler.errors import UnknownName
from profiler.limits import Ge, Le, MaxLen

__all__ = ["OPTIMIZERS", "PRECISIONS", "Precision", "Request"]

Count = Annotated[int, Ge(1), Le(2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes per parameter and per activation element.

    stored_bytes: the parameter that the optimizer updates, sharded.
    compute_bytes: activations, and the gathered copy of a parameter that layers compute with.
    gradient_bytes: the gradient that the optimizer reads, sharded.
    reduce_bytes: gradients while they accumulate unsharded and are reduced.
    state_bytes: one optimizer moment.
    beside_bytes: gradients in the compute dtype that stay, whole, beside the accumulated ones.
    """

    dtype: str
    stored_bytes: int
    compute_bytes: int
    gradient_bytes: int
    reduce_bytes: int
    state_bytes: int
    beside_bytes: int = 0

    @property
    def has_compute_copy(self) -> bool:
        """Whether layers compute with a copy even where nothing is sharded."""
        return self.compute_bytes != self.stored_bytes


# FSDP2's MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32) keeps fp32 parameters, gradients
# and moments (16 bytes a parameter) and gathers bf16 copies: with the copy, Megatron's 18 bytes.
# fp8-mixed is bf16-mixed with the matmuls of the blocks in float8: their operands are cast first.
# fp8-rowwise-mixed has a scale for each row of an operand instead of one for all of it.
PRECISIONS = {
    "bf16-mixed": Precision(dtype="bfloat16", stored_bytes=4, compute_bytes=2, gradient_bytes=4,
                            reduce_bytes=4, state_bytes=4),
    "fp16-mixed": Precision(dtype="float16", stored_bytes=4, compute_bytes=2, gradient_bytes=4,
                            reduce_bytes=4, state_bytes=4),
    "fp8-mixed": Precision(dtype="float8", stored_bytes=4, compute_bytes=2, gradient_bytes=4,
                           reduce_bytes=4, state_bytes=4),
    "fp8-rowwise-mixed": Precision(dtype="float8_rowwise", stored_bytes=4, compute_bytes=2,
                                   gradient_bytes=4, reduce_bytes=4, state_bytes=4),
    "bf16": Precision(dtype="bfloat16", stored_bytes=2, compute_bytes=2, gradient_bytes=2,
                      reduce_bytes=2, state_bytes=2),
    "fp32": Precision(dtype="float32", stored_bytes=4, compute_bytes=4, gradient_bytes=4,
                      reduce_bytes=4, state_bytes=4),
}

OPTIMIZERS = {"adamw": 2, "lion": 1, "sgd-momentum": 1, "sgd": 0}
"""Moments kept per trainable parameter."""


@functools.cache
def _recipe(precision: str, stack: str) -> Precision:
    recipe, described = PRECISIONS[precision], load_stack(stack)
    width = described.gradient_bytes
    if not recipe.has_compute_copy:
        return recipe
    if described.keeps_bfloat16_gradients and recipe.dtype == "bfloat16":
        recipe = replace(recipe, beside_bytes=recipe.compute_bytes)
    return recipe if width is None else replace(recipe, gradient_bytes=width, reduce_bytes=width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be trained, how, and what the planner must keep to.

    global_batch: samples per optimizer step. seq_len: tokens per sample (1 for images).
    memory_margin: share of each device's memory left free. Runs planned to the last byte fail now
        and then (30-60 % of them in NVIDIA-NeMo/Megatron-Bridge#3107, which advises 8-10 %).
    fused_optimizer: the update needs no temporary copies of the local shard.
    stack: the software that runs it (`planner/stacks`); None: the target's.
    sequence_parallel: between tensor-parallel regions; None: where target and stack can.
    The degrees, where given, are demanded of every layout considered.
    """

    __pydantic_config__: ClassVar = STRICT

    global_batch: Count
    seq_len: Count
    precision: PrecisionName = "bf16-mixed"
    optimizer: Literal["adamw", "lion", "sgd-momentum", "sgd"] = "adamw"
    fused_optimizer: bool = True
    memory_margin: Annotated[float, Ge(0), Le(0.9)] = 0.08
    target: Annotated[str, MaxLen(100)] = "executor"
    stack: Annotated[str, MaxLen(100)] | None = None
    sequence_parallel: bool | None = None
    pp: Count | None = None
    dp_replicate: Count | None = None
    dp_shard: Count | None = None
    tp: Count | None = None
    micro_batch: Count | None = None
    schedule: Literal["1f1b", "gpipe", "interleaved"] | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    use_all_devices: bool = False

    @property
    def bytes(self) -> Precision:
        """The precision recipe, with the gradients of the stack."""
        return _recipe(self.precision, self.stack_name)

    @property
    def stack_name(self) -> str:
        """The stack, or the target's."""
        return self.stack or default_stack(self.target)

    @property
    def num_moments(self) -> int:
        """Optimizer moments per trainable parameter."""
        if self.optimizer not in OPTIMIZERS:
            raise UnknownName("optimizer", self.optimizer, OPTIMIZERS)
        return OPTIMIZERS[self.optimizer]
