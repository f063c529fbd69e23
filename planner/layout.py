"""The Layout: how one training run is spread over devices, as one document.

A layout that a person wrote needs only `model`, `topology`, `request`, `mesh`, `micro_batch`,
`num_micro_batches`, `schedule` and `stages`; `prediction` and `proof` are what the planner adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Annotated, ClassVar, Literal

from planner.capabilities import RecomputeMode, ScheduleName
from planner.request import Request
from profiler.documents import STRICT
from profiler.limits import Ge, Le, Len, MaxLen

__all__ = ["AXES", "Alternative", "Choice", "Layout", "LayerRun", "Mesh", "Prediction", "Proof",
           "Reference", "Schedule", "Stage", "StagePrediction", "Terms"]

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
Degree = Annotated[int, Ge(1), Le(131_072)]
Name = Annotated[str, MaxLen(1000)]
Terms = dict[Name, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Degrees of the axes and how they lie over the devices.

    order: the axes from the outermost to the innermost; neighbours along the innermost axis are
        neighbouring devices. Axes left out have degree 1.
    host_groups: the order in which the topology's host groups are filled (indices; empty: as
        listed).
    """

    __pydantic_config__: ClassVar = STRICT

    pp: Degree = 1
    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    cp: Degree = 1
    tp: Degree = 1
    ep: Degree = 1
    order: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "tp")
    host_groups: tuple[Annotated[int, Ge(0), Le(255)], ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.order)) != len(self.order):
            raise ValueError(f"order {self.order} names an axis twice")
        missing = [axis for axis in AXES if self.degree(axis) > 1 and axis not in self.order]
        if missing:
            raise ValueError(f"order {self.order} leaves out {missing}, whose degrees exceed 1")

    def degree(self, axis: Axis) -> int:
        """Degree of an axis."""
        return int(getattr(self, axis))

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks: each works on its own samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_devices(self) -> int:
        return prod(self.degree(axis) for axis in AXES)

    def stride(self, axis: Axis) -> int:
        """Distance in ranks between neighbours along an axis."""
        inner = self.order[self.order.index(axis) + 1:] if axis in self.order else ()
        return prod(self.degree(a) for a in inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The pipeline schedule; `chunks` is the number of stages per pipeline rank (interleaved > 1).

    gradient_sync: `last_micro_batch` accumulates unsharded gradients and reduces them once a
        step; `each_micro_batch` reduces after every one and keeps only the shard.
    """

    __pydantic_config__: ClassVar = STRICT

    name: ScheduleName = "1f1b"
    chunks: Annotated[int, Ge(1), Le(1024)] = 1
    gradient_sync: Literal["last_micro_batch", "each_micro_batch"] = "last_micro_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is chosen for one layer.

    recompute: which saved activations are dropped and computed again in backward.
    reshard: gathered parameters are freed after forward and gathered again (ZeRO-3), or kept.
    tensor_parallel: divided over the tensor-parallel group, or held whole by each of its ranks.
    """

    __pydantic_config__: ClassVar = STRICT

    recompute: RecomputeMode = "none"
    reshard: bool = True
    tensor_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """`num_layers` neighbouring layers from `first_layer` on with one choice."""

    __pydantic_config__: ClassVar = STRICT

    first_layer: Annotated[int, Ge(0)]
    num_layers: Annotated[int, Ge(1)]
    choice: Choice = Choice()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage: its layers in order. Stage k of p*v runs on pipeline rank k mod p."""

    __pydantic_config__: ClassVar = STRICT

    runs: Annotated[tuple[LayerRun, ...], Len(1, 20_000)]

    @property
    def first_layer(self) -> int:
        return self.runs[0].first_layer

    @property
    def num_layers(self) -> int:
        return sum(run.num_layers for run in self.runs)

    def iter_layers(self) -> list[tuple[int, Choice]]:
        """(layer index, choice) of every layer."""
        return [(run.first_layer + i, run.choice) for run in self.runs
                for i in range(run.num_layers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Which document a layout is about: what finds it again, and the digest of its content."""

    __pydantic_config__: ClassVar = STRICT

    name: Name
    digest: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """What one pipeline rank does and holds.

    micro_batch_s: named seconds of one micro-batch, forward and backward.
    tail_s: named seconds after the last backward. memory_bytes: named bytes at the peak.
    """

    __pydantic_config__: ClassVar = STRICT

    pipeline_rank: int
    device: Name
    micro_batch_s: Terms
    tail_s: Terms
    memory_bytes: dict[Name, int]
    capacity_bytes: int
    in_flight: int

    @property
    def total_memory_bytes(self) -> int:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted step time as named terms that add up, and memory per pipeline rank.

    replay_s: the same step replayed event by event (its schedule, with sends).
    mfu: model FLOPs utilisation; model FLOPs are matmuls and attention of one forward and backward,
        causal attention counted in full, recompute not counted, over the devices' summed dense
        peak.
    sources: how each term was obtained: measured, extrapolated from measured sizes, or analytic.
    measured_share: of step_s, what rests on measured seconds at measured sizes.
    """

    __pydantic_config__: ClassVar = STRICT

    step_s: float
    step_terms_s: Terms
    replay_s: float
    samples_per_s: float
    tokens_per_s_per_device: float
    mfu: float
    stages: tuple[StagePrediction, ...]
    sources: dict[Name, Name] = field(default_factory=dict)
    measured_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A runner-up: its mesh in words, how much slower, and the term that grew most."""

    __pydantic_config__: ClassVar = STRICT

    description: Name
    step_s: float
    slower_by: float
    why: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How far the answer is proven.

    status: OPTIMAL = no layout of the space is faster under the cost model; FEASIBLE = stopped
        early, at most `gap` (share of step_s) slower than the best; MANUAL = not searched.
    bound_s: no layout of the space has a shorter step. resolution: relative rounding of the
        program's integers, the meaning of gap 0.
    """

    __pydantic_config__: ClassVar = STRICT

    status: Literal["OPTIMAL", "FEASIBLE", "MANUAL"]
    bound_s: float
    gap: float
    space_size: int
    candidates: int
    bounded: int
    solved: int
    resolution: float
    solver: Name = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The whole answer."""

    __pydantic_config__: ClassVar = STRICT

    meshwright: Literal["Layout"] = "Layout"
    version: Literal[1] = 1
    model: Reference
    topology: Reference
    request: Request
    mesh: Mesh
    micro_batch: Annotated[int, Ge(1), Le(2**31)]
    num_micro_batches: Annotated[int, Ge(1), Le(2**31)]
    schedule: Schedule = Schedule()
    stages: Annotated[tuple[Stage, ...], Len(1, 20_000)]
    notes: tuple[Name, ...] = ()
    links: Reference | None = None
    prediction: Prediction | None = None
    proof: Proof | None = None
    alternatives: tuple[Alternative, ...] = ()
    meshwright_version: Annotated[str, MaxLen(50)] = ""
