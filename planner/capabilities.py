"""What the engine that will run a layout can do, as data that the planner reads.

Each target has one JSON file; the project's own executor keeps its file beside its code
(`executor/capabilities.json`), so that the planner plans only what the executor runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from profiler.documents import STRICT, load_shipped
from profiler.errors import UnknownName

__all__ = ["Capabilities", "PrecisionName", "RecomputeMode", "ScheduleName", "load_capabilities"]

ScheduleName = Literal["1f1b", "gpipe", "interleaved"]
RecomputeMode = Literal["none", "selective", "full"]
PrecisionName = Literal["bf16-mixed", "fp16-mixed", "fp8-mixed", "fp8-rowwise-mixed", "bf16",
                        "fp32"]

_FILES = {"executor": Path(__file__).parent.parent / "executor" / "capabilities.json",
          "any": Path(__file__).parent / "targets" / "any.json"}
"""`any` is no engine in particular: it runs whatever can be priced, as layouts of others do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a target runs.

    replicate_kv_heads: a tensor-parallel degree above the number of KV heads, each of which several
        ranks then hold.
    pad_vocabulary: a vocabulary that the degree does not divide (the last shard is padded).
    uneven_stages: stages of unlike numbers of layers.
    gradient_sync_per_micro_batch_with_pipeline: gradients reduced after each micro-batch although
        there are pipeline stages; otherwise they accumulate whole and are reduced at the end.
    gradient_overlap_with_pipeline: that last reduction runs beside the last backward.
    tensor_parallel_samples: the kinds of models that tensor parallelism divides.
    tensor_parallel_classes: of the classes whose code counts on heads, or on all tokens
        (`TensorParallel.callers`), those that can be divided; null: all.
    outside_parameters: parameters outside every layer may be divided and cut into stages.
    batch_statistics: batch normalization over the whole batch with several micro-batches and with
        recompute; otherwise only in one micro-batch, not recomputed.
    """

    __pydantic_config__: ClassVar = STRICT

    target: str
    schedules: tuple[ScheduleName, ...]
    recompute: tuple[RecomputeMode, ...]
    sequence_parallel: bool
    replicate_kv_heads: bool
    pad_vocabulary: bool
    uneven_stages: bool
    tensor_parallel_per_layer: bool
    reshard_per_layer: bool
    gradient_sync_per_micro_batch_with_pipeline: bool
    gradient_overlap_with_pipeline: bool
    min_micro_batches_1f1b: Literal["stages", "one"]
    interleaved_micro_batches: Literal["multiple_of_pp", "any"]
    precisions: tuple[PrecisionName, ...]
    tensor_parallel_samples: tuple[Literal["tokens", "images", "features"], ...]
    tensor_parallel_classes: tuple[str, ...] | None
    outside_parameters: bool
    batch_statistics: bool


@functools.cache
def load_capabilities(target: str) -> Capabilities:
    """The capabilities of a target by name."""
    if target not in _FILES:
        raise UnknownName("target", target, _FILES)
    return load_shipped(Capabilities, _FILES[target])
