"""What one run of a model is written down as: operations, storages and calls of layers."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Call", "RawOp", "Run", "Storage", "Use"]


@dataclass(frozen=True, slots=True)
class Use:
    """A tensor read or written by an operation."""

    storage: int
    numel: int
    shape: tuple[int, ...]
    transposed: bool
    requires_grad: bool


@dataclass(slots=True)
class Storage:
    """One allocation. Times count operations; `freed` is the first at which it is gone.

    derived: computed from a sample or a parameter; learned: from a parameter.
    writer: the layer that wrote it last.
    """

    num_bytes: int
    itemsize: int
    fixed_dtype: bool
    made_at: int
    creator: int | None
    layer: int
    external: bool
    derived: bool
    learned: bool
    freed: int | None = None
    writer: int = -1


@dataclass(slots=True)
class RawOp:
    """One operation that is no view. `origin`: in backward, the forward operation it serves."""

    name: str
    layer: int
    inside: bool
    module: str
    forward: bool
    time: int
    origin: int | None
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    flops: int
    in_norm: bool
    kernel: bool
    attention: tuple[int, int, int, int, int, bool] | None = None
    grouped_from: int | None = None


@dataclass(slots=True)
class Call:
    """One call of a layer. `like` is the call whose inner operations stand for this one's.

    writers: for each input, the layer that last wrote it (-1: none).
    """

    path: str
    like: int
    inputs: tuple[Use, ...]
    writers: tuple[int, ...]
    outputs: tuple[Use, ...] = ()


@dataclass(slots=True)
class Run:
    """All that one run showed. Parameters and buffers are storages with a name."""

    ops: list[RawOp] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    saved: list[tuple[int, int, bool]] = field(default_factory=list)
    parameters: dict[int, int] = field(default_factory=dict)
    buffers: set[int] = field(default_factory=set)
    has_loss: bool = False
