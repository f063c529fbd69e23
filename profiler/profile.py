"""The Profile: seconds and bytes measured on one device, held in the LayerGraph that they are of.

A profile says on what it was measured (`hardware`, `versions`, `date`) and under which load
(`num_processes` measured at once on the host, `num_threads` each). Times are of one micro-batch,
medians over repeats; `spread` is the interquartile range over the median.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from profiler.documents import STRICT
from profiler.limits import Ge, Gt, Le, Len, MaxLen

__all__ = ["Failure", "FrameSeconds", "LayerBytes", "LayerSeconds", "Profile", "SavedTensor",
           "UpdateSeconds"]

Name = Annotated[str, MaxLen(400)]
Seconds = Annotated[float, Ge(0), Le(1e6)]
Count = Annotated[int, Ge(1), Le(2**31)]
Bytes = Annotated[int, Ge(0), Le(2**60)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """One kind of layer, with the work outside layers that the LayerGraph gives to it.

    tensor_parallel: the degree whose rank 0 was measured, collectives taken out.
    recompute_*: what backward takes longer with that recompute.
    outside_s: the part of forward and backward that is work outside of the layer's module.
    accumulate_s: adding the layer's gradients to those of micro-batches before; None: not measured.
    wait_s: mean seconds for which the processes that measured it at once would have waited for the
        slowest, forward plus backward, where each timed part began together; None: not measured.
    settled: whether the error of the median came below what was asked for.
    """

    __pydantic_config__: ClassVar = STRICT

    kind: Name
    micro_batch: Count
    seq_len: Count
    tensor_parallel: Count = 1
    forward_s: Seconds
    backward_s: Seconds
    recompute_selective_s: Seconds
    recompute_full_s: Seconds
    outside_s: Seconds = 0.0
    accumulate_s: Seconds | None = None
    wait_s: Seconds | None = None
    spread: Annotated[float, Ge(0), Le(1e6)]
    num_repeats: Count
    settled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Storages that autograd keeps from forward to backward, by the module that made it keep
    them."""

    __pydantic_config__: ClassVar = STRICT

    name: Name
    num_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one kind of layer alone, parameters and their gradients apart.

    saved: by tensor, the layer's inputs among them where autograd keeps them.
    kept_bytes, kept_selective_bytes, kept_full_bytes: allocated between forward and backward by
        each recompute; inputs, which another layer made, are not in it.
    forward_peak_bytes, backward_peak_bytes: the most allocated during each (recompute none), what
        forward leaves for backward included.
    """

    __pydantic_config__: ClassVar = STRICT

    kind: Name
    micro_batch: Count
    seq_len: Count
    tensor_parallel: Count = 1
    saved: tuple[SavedTensor, ...]
    kept_bytes: Bytes
    kept_selective_bytes: Bytes
    kept_full_bytes: Bytes
    forward_peak_bytes: Bytes
    backward_peak_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSeconds:
    """The optimizer step and the gradient norm with clipping over `num_parameters` parameters.

    temporary_bytes: what the step allocates beyond parameters, gradients and states.
    staging_s: copying every layer's gradients into one new buffer, as FSDP2 does before it reduces
        them; None: not measured.
    """

    __pydantic_config__: ClassVar = STRICT

    optimizer: Name
    fused: bool
    stored_dtype: Name
    num_parameters: Count
    update_s: Annotated[float, Gt(0), Le(1e6)]
    norm_s: Annotated[float, Gt(0), Le(1e6)]
    temporary_bytes: Bytes
    spread: Annotated[float, Ge(0), Le(1e6)]
    staging_s: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSeconds:
    """What each stage of a pipeline but the first does before its own layers in every micro-batch:
    the model's own forward up to there, without layers (masks, positions, the calls themselves).

    Of a stage in the middle of the model; on CPUs alone: the host of an accelerator runs ahead.
    """

    __pydantic_config__: ClassVar = STRICT

    micro_batch: Count
    seq_len: Count
    tensor_parallel: Count = 1
    forward_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case that could not be measured, which is a result as well."""

    __pydantic_config__: ClassVar = STRICT

    kind: Name
    micro_batch: Count
    seq_len: Count
    tensor_parallel: Count = 1
    reason: Literal["out_of_memory", "unsupported"]
    note: Annotated[str, MaxLen(1000)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured on one device.

    device: the name of the device file that it is about. dtype: of the layers' computation.
    busy: what disturbed the measurement, as far as it was noticed.
    """

    __pydantic_config__: ClassVar = STRICT

    device: Name
    dtype: Name
    hardware: Name
    versions: dict[Name, Name]
    date: Name
    num_processes: Count = 1
    num_threads: Count = 1
    compiled: bool = False
    context_bytes: Bytes = 0
    layers: Annotated[tuple[LayerSeconds, ...], MaxLen(100_000)] = ()
    memory: Annotated[tuple[LayerBytes, ...], MaxLen(100_000)] = ()
    updates: Annotated[tuple[UpdateSeconds, ...], MaxLen(100)] = ()
    frames: Annotated[tuple[FrameSeconds, ...], MaxLen(10_000)] = ()
    failures: Annotated[tuple[Failure, ...], MaxLen(100_000)] = ()
    busy: Annotated[tuple[Annotated[str, Len(1, 1000)], ...], MaxLen(100)] = field(
        default_factory=tuple)

    def __post_init__(self) -> None:
        seen = set()
        for row in self.layers:
            case = (row.kind, row.micro_batch, row.seq_len, row.tensor_parallel)
            if case in seen:
                raise ValueError(f"layers: (kind, micro_batch, seq_len, tensor_parallel) {case} is "
                                 "given twice")
            seen.add(case)

    def kinds(self) -> set[str]:
        """The kinds of layer that it is about."""
        return ({row.kind for row in self.layers} | {row.kind for row in self.memory}
                | {row.kind for row in self.failures})

    def known(self, micro_batch: int, seq_len: int, tensor_parallel: int) -> set[str]:
        """The kinds of which this size is measured, or known to fail."""
        key = (micro_batch, seq_len, tensor_parallel)
        return ({row.kind for row in self.layers
                 if (row.micro_batch, row.seq_len, row.tensor_parallel) == key}
                | {row.kind for row in self.failures
                   if (row.micro_batch, row.seq_len, row.tensor_parallel) == key})
