"""The Stack record, the fitted constants of its kernels, and the shipped files."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from profiler.device import Curve, Device
from profiler.documents import STRICT, load_shipped
from profiler.errors import UnknownName
from profiler.limits import Ge, Gt, Le, Len, MaxLen

__all__ = ["DEFAULT_STACKS", "FITTED", "Fit", "FittedConstants", "Kernels", "Stack",
           "default_stack", "kernels_for", "load_stack", "stack_names"]

STACKS = Path(__file__).parent
FITTED = STACKS / "fitted.json"
DEFAULT_STACKS = {"executor": "pytorch-eager", "any": "pytorch-eager"}
"""What a target runs on unless the request says otherwise."""

Name = Annotated[str, MaxLen(200)]
Text = Annotated[str, MaxLen(2000)]
Fusion = Literal["normalization", "rotary", "activation", "residual", "loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What an engine does with the layers of a model.

    attention: `fused` (FlashAttention: the scores never leave the chip), or `fused-softmax` (two
        batched matmuls and one softmax kernel), or `eager` (every step of the softmax on its own).
    fused: pointwise work that runs as one kernel, reading its inputs and writing its outputs once.
    selective: what `selective` recompute drops: all but the outputs of matmuls and attention
        (`matmul-outputs`), those of every second matmul as well (`alternate-matmuls`), or nothing
        but the inside of attention (`core-attention`, Korthikanti et al. 2022).
    sequence_parallel: activations between tensor-parallel regions are divided where they can be.
    gathers_saved_inputs: under sequence parallelism a column matmul keeps only its shard of the
        input and gathers it again in backward (Megatron-LM).
    float32_normalization: a norm that is not fused stays in float32 up to its result, and keeps
        what it normalised so.
    keeps_packed_attention: attention's value is a view of the product that queries and keys were
        taken from, which stays with it beside the rotated ones.
    float32_softmax: eager attention keeps the softmax in float32 beside its result.
    whole_logits: each tensor-parallel rank gathers the logits and computes the whole loss.
    logit_bytes: of one logit at the peak of the loss, what is left of the last micro-batches'
        included; None: as traced.
    scatters_sends: without sequence parallelism, each tensor-parallel rank sends its part of an
        activation to the next stage, where it is gathered (Narayanan et al. 2021, section 4.1).
    reduces_each_column: without sequence parallelism, the gradients that the two column matmuls of
        a gated MLP leave in their input are all-reduced each on its own.
    loss: step by step as traced (`eager`), or Megatron-LM's over a divided vocabulary, in place, of
        many small kernels (`vocabulary-parallel`); `fused` may name it instead.
    gradient_bytes: of accumulated and reduced gradients; None: as the precision says.
    keeps_bfloat16_gradients: each micro-batch's are added to float32 ones, and stay beside them.
    overlaps_gradient_reduction: the last one runs beside the last backward; None: as the
        capabilities of the target say.
    copies_messages: parameters and gradients are copied into and out of the messages of data
        parallelism (FSDP2), rather than kept where they are sent from.
    overlaps_parameter_gather: of kept parameters (ZeRO-1/2), beside the first micro-batch.
    """

    __pydantic_config__: ClassVar = STRICT

    meshwright: Literal["Stack"] = "Stack"
    version: Literal[1] = 1
    name: Name
    description: Text
    attention: Literal["fused", "fused-softmax", "eager"] = "fused"
    fused: tuple[Fusion, ...] = ()
    selective: Literal["matmul-outputs", "alternate-matmuls", "core-attention"] = "matmul-outputs"
    sequence_parallel: bool = True
    gathers_saved_inputs: bool = False
    float32_normalization: bool = False
    keeps_packed_attention: bool = False
    float32_softmax: bool = False
    whole_logits: bool = False
    logit_bytes: Annotated[int, Ge(4), Le(64)] | None = None
    scatters_sends: bool = False
    reduces_each_column: bool = False
    loss: Literal["eager", "vocabulary-parallel"] = "eager"
    gradient_bytes: Annotated[int, Ge(2), Le(4)] | None = None
    keeps_bfloat16_gradients: bool = False
    overlaps_gradient_reduction: bool | None = None
    overlaps_parameter_gather: bool = True
    copies_messages: bool = False
    kernels: Name | None = None
    sources: dict[Name, Text]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How fast a stack's kernels are on one kind of device; None: as the device file says.

    host_kernel_s: what the host needs to launch one kernel; a layer is no faster than the launches
        of its kernels. The others: as in `profiler/device.py`.
    host_link_scale, network_scale: of the bandwidth that collectives reach by the topology file,
        between devices of a host and between hosts: what the stack's own calls reach of it.
    """

    __pydantic_config__: ClassVar = STRICT

    matmul_efficiency: Curve | None = None
    attention_efficiency: Curve | None = None
    float8_efficiency: Curve | None = None
    memory_efficiency: Curve | None = None
    kernel_launch_s: Annotated[float, Ge(0), Le(1)] | None = None
    host_kernel_s: Annotated[float, Ge(0), Le(1)] | None = None
    partly_aligned: Annotated[float, Gt(0), Le(1)] | None = None
    unaligned: Annotated[float, Gt(0), Le(1)] | None = None
    scores_share: Annotated[float, Gt(0), Le(1)] | None = None
    batched_share: Annotated[float, Gt(0), Le(1)] | None = None
    overlap_slowdown: Annotated[float, Ge(1), Le(2)] | None = None
    host_link_scale: Annotated[float, Gt(0), Le(4)] | None = None
    network_scale: Annotated[float, Gt(0), Le(4)] | None = None

    def device(self, device: Device) -> Device:
        """The device as this stack finds it."""
        given = {name: getattr(self, name)
                 for name in ("matmul_efficiency", "attention_efficiency", "float8_efficiency",
                              "memory_efficiency",
                              "kernel_launch_s", "host_kernel_s", "partly_aligned",
                              "unaligned", "scores_share", "batched_share",
                              "overlap_slowdown")}
        given = {name: value for name, value in given.items() if value is not None}
        return replace(device, **given) if given else device


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted constants, and what they were fitted on.

    kernels: the name that stacks refer to. devices: the kinds of device it holds for. most_hosts:
        of a topology that it holds for; None for any. The first that holds counts.
    rows, models: that were fitted on. error_fitted, error_held_out: mean absolute relative error
        on them, and on the rows of other models; None where there are none.
    """

    __pydantic_config__: ClassVar = STRICT

    kernels: Name
    devices: Annotated[tuple[Name, ...], Len(1, 32)]
    most_hosts: Annotated[int, Ge(1)] | None = None
    constants: Kernels
    rows: Annotated[int, Ge(1)]
    models: tuple[Name, ...]
    error_fitted: float
    error_held_out: float | None = None
    rows_held_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """The file of fitted constants."""

    __pydantic_config__: ClassVar = STRICT

    meshwright: Literal["FittedConstants"] = "FittedConstants"
    version: Literal[1] = 1
    made_by: Name
    fits: tuple[Fit, ...] = ()


def stack_names() -> tuple[str, ...]:
    """Names of the shipped stacks."""
    return tuple(sorted(path.stem for path in STACKS.glob("*.json") if path != FITTED))


@functools.cache
def load_stack(name: str) -> Stack:
    """A shipped stack by name."""
    known = stack_names()
    if name not in known:
        raise UnknownName("stack", name[:80], known)
    return load_shipped(Stack, STACKS / f"{name}.json")


def default_stack(target: str) -> str:
    """The stack of a target."""
    return DEFAULT_STACKS.get(target, "pytorch-eager")


@functools.cache
def fitted_constants() -> FittedConstants:
    """The shipped fit."""
    return load_shipped(FittedConstants, FITTED)


def kernels_for(stack: Stack, device: str, num_hosts: int) -> Kernels:
    """The fitted constants of a stack on a kind of device; none where nothing was fitted."""
    if stack.kernels is not None:
        for fit in fitted_constants().fits:
            if fit.kernels == stack.kernels and device in fit.devices and (
                    fit.most_hosts is None or num_hosts <= fit.most_hosts):
                return fit.constants
    return Kernels()
