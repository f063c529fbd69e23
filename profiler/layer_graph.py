"""The LayerGraph: what a model is made of and what each layer costs, as one document.

Symbols: b = samples in a micro-batch, s = sequence length. Every size that depends on them is an
`Extent`, an exact polynomial in both, so one trace prices every micro-batch and sequence length.

Layers of equal `kind` cost the same; costs are held once per kind. Splits name how a quantity is
divided over a tensor-parallel group of degree t (Megatron's terms):

    column      a matmul whose output features are divided; its input is whole
    row         a matmul whose input features are divided; its output needs a reduction
    heads       attention, divided by heads
    feature     between a column and a row matmul: divided by t
    sequence    outside: divided by t only under sequence parallelism
    vocabulary  divided by rows or columns of the vocabulary
    gathered    the whole input that a column matmul keeps for its weight gradient
    replicated  never divided
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from profiler.documents import STRICT
from profiler.limits import Ge, Len, MaxLen
from profiler.profile import Profile

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["AttentionShape", "Edge", "Extent", "Layer", "LayerGraph", "LayerKind", "MatmulShape",
           "ModelSource", "Op", "Parameter", "Split", "TensorGroup", "TensorParallel", "Tie",
           "VERSION"]

VERSION: Literal[1] = 1

Split = Literal["column", "row", "heads", "feature", "sequence", "vocabulary", "gathered",
                "replicated"]
OpKind = Literal["matmul", "attention", "convolution", "normalization", "pointwise", "embedding",
                 "loss", "other"]
Coefficient = Annotated[int, Ge(-(2**62))]
Polynomial = tuple[Coefficient, Coefficient, Coefficient]
Name = Annotated[str, MaxLen(400)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A count: `f0 + f1*s + f2*s^2 + b*(p0 + p1*s + p2*s^2)`."""

    __pydantic_config__: ClassVar = STRICT

    fixed: Polynomial = (0, 0, 0)
    per_sample: Polynomial = (0, 0, 0)

    def at(self, micro_batch: int, seq_len: int) -> int:
        """The count for b = micro_batch samples of s = seq_len tokens (s = 1 for images)."""
        f, p, s = self.fixed, self.per_sample, seq_len
        return f[0] + s * (f[1] + s * f[2]) + micro_batch * (p[0] + s * (p[1] + s * p[2]))

    def __add__(self, other: Extent) -> Extent:
        (a, b, c), (d, e, f) = self.fixed, other.fixed
        (p, q, r), (s, t, u) = self.per_sample, other.per_sample
        return Extent(fixed=(a + d, b + e, c + f), per_sample=(p + s, q + t, r + u))


NOTHING = Extent()


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulShape:
    """`batch` independent products of (rows x inner) by (inner x columns).

    groups: the rows are spread evenly over this many weight matrices (the experts of a mixture).
    """

    __pydantic_config__: ClassVar = STRICT

    rows: Extent
    columns: Extent
    inner: Extent
    batch: Extent = Extent(fixed=(1, 0, 0))
    groups: Annotated[int, Ge(1)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Fused scaled-dot-product attention of one sample: lengths are per sample."""

    __pydantic_config__: ClassVar = STRICT

    heads: Annotated[int, Ge(1)]
    kv_heads: Annotated[int, Ge(1)]
    head_dim: Annotated[int, Ge(1)]
    queries: Extent
    keys: Extent
    causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of a layer, or several small ones of one module taken together.

    flops count a multiply-add as 2 (as `torch.utils.flop_counter`), attention in full even if
    causal. Elements moved (read + written) are of the compute dtype; bytes moved are of
    tensors whose dtype is fixed (indices, masks, float32 statistics). Backward covers both
    gradients. kept_by_selective: selective recompute does not run it again; None: as its kind is
    (matmuls and attention are kept).
    """

    __pydantic_config__: ClassVar = STRICT

    name: Name
    kind: OpKind
    split: Split
    flops: Extent = NOTHING
    backward_flops: Extent = NOTHING
    elements_moved: Extent = NOTHING
    bytes_moved: Extent = NOTHING
    backward_elements_moved: Extent = NOTHING
    backward_bytes_moved: Extent = NOTHING
    kernels: Annotated[int, Ge(0)] = 1
    backward_kernels: Annotated[int, Ge(0)] = 1
    kept_by_selective: bool | None = None
    matmul: MatmulShape | None = None
    attention: AttentionShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter; `split` and `split_dim` say how tensor parallelism would divide it."""

    __pydantic_config__: ClassVar = STRICT

    name: Name
    shape: tuple[Annotated[int, Ge(0)], ...]
    dtype: Name = "float32"
    trainable: bool = True
    split: Split = "replicated"
    split_dim: int | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Activation tensors alive together: `bytes_per_element` is None for the compute dtype.

    is_outside: kept by work outside of the layer's module (a loss), or made there and given to many
        layers (rotary tables), so that no recompute of the layer frees it.
    is_copy: in float32 of a tensor that is kept as well: none where the compute dtype is float32.
    is_copy_of_input: in float32 of what the layer is given, and not kept otherwise: where the
        compute dtype is float32, it is that itself.
    """

    __pydantic_config__: ClassVar = STRICT

    name: Name
    elements: Extent
    split: Split
    bytes_per_element: Annotated[int, Ge(1)] | None = None
    kept_by_selective: bool = False
    is_input: bool = False
    is_outside: bool = False
    is_copy: bool = False
    is_copy_of_input: bool = False

    def is_given(self, compute_bytes: int) -> bool:
        """Whether the layer was given these tensors, rather than made them."""
        return self.is_input or (self.is_copy_of_input and compute_bytes == 4)

    def bytes_at(self, micro_batch: int, seq_len: int, compute_bytes: int) -> int:
        """Bytes of the whole (undivided) tensors."""
        if self.is_copy and compute_bytes == 4:
            return 0
        return self.elements.at(micro_batch, seq_len) * (self.bytes_per_element or compute_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """How a layer may be divided over a tensor-parallel group.

    `divides` maps a named dimension (heads, kv_heads, ffn, vocabulary, experts, ...) to its size;
    a legal degree divides each, `kv_heads` excepted where the executor replicates KV heads, and
    `vocabulary` excepted where it pads. `entries` are the elements of each activation that enters
    a column region (gathered forward, its gradient reduced backward); `exits` of each that leaves
    a row region (reduced forward, its gradient gathered backward).

    `callers`: classes of modules whose code is not proven, by the operations seen, to work on
    shards of heads, features or tokens: whoever divides the layer has to know them.
    `kv_parameters` make keys and values alone: a degree above `kv_heads` holds them repeatedly.
    """

    __pydantic_config__: ClassVar = STRICT

    divides: dict[Name, Annotated[int, Ge(1)]]
    entries: tuple[Extent, ...] = ()
    exits: tuple[Extent, ...] = ()
    callers: tuple[Name, ...] = ()
    kv_parameters: tuple[Name, ...] = ()

    def kv_copies(self, degree: int) -> int:
        """Ranks that compute each KV head, where there are fewer of them than ranks; else 1.

        Each rank then holds the parameters of all KV heads, and computes with those of its own.
        """
        if not self.kv_parameters:
            return 1
        return max(1, degree // self.divides.get("kv_heads", degree))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """All that layers of one signature have in common.

    saved: what autograd keeps from forward to backward, each storage once, parameters excluded.
    inputs: the activations that the layer's module is given (each storage at its first reader),
    which full recompute keeps whether or not autograd does; none where it has no backward.
    kept_only_by_selective: outputs of matmuls and attention that autograd does not keep and a
    selective-checkpoint policy that saves every such output does; not what another layer is given.
    forward_working_set / backward_working_set: what is alive besides `saved`, parameters and the
    parameter gradients when forward / backward of this layer is at its peak.
    batch_statistics: it normalizes by statistics of the whole batch (batch normalization).
    """

    __pydantic_config__: ClassVar = STRICT

    parameters: tuple[Parameter, ...] = ()
    buffer_bytes: Annotated[int, Ge(0)] = 0
    ops: tuple[Op, ...] = ()
    saved: tuple[TensorGroup, ...] = ()
    inputs: tuple[TensorGroup, ...] = ()
    kept_only_by_selective: tuple[TensorGroup, ...] = ()
    forward_working_set: tuple[TensorGroup, ...] = ()
    backward_working_set: tuple[TensorGroup, ...] = ()
    tensor_parallel: TensorParallel | None = None
    batch_statistics: bool = False

    @property
    def num_parameters(self) -> int:
        return sum(p.numel for p in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the model, in a topological order. `name` is its fully qualified name."""

    __pydantic_config__: ClassVar = STRICT

    name: Name
    kind: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor made by layer `source` and read by layer `target` (indices into `layers`)."""

    __pydantic_config__: ClassVar = STRICT

    source: Annotated[int, Ge(0)]
    target: Annotated[int, Ge(0)]
    tensor: Name
    elements: Extent
    bytes_per_element: Annotated[int, Ge(1)] | None = None
    has_gradient: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """One parameter shared by several layers: (layer index, parameter name) of each place."""

    __pydantic_config__: ClassVar = STRICT

    places: Annotated[tuple[tuple[Annotated[int, Ge(0)], Name], ...], Len(2, 64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What rebuilds the module: a Hugging Face class and config, or a Python function.

    loss: what was traced with a model of one's own: a name of `profiler.losses`, "module" if it
        returns one scalar itself, or "none"; None: a Hugging Face model, or not known.
    """

    __pydantic_config__: ClassVar = STRICT

    hugging_face_class: Name | None = None
    hugging_face_config: dict[str, Any] | None = None
    python_function: Name | None = None
    loss: Name | None = None
    note: Name = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """The layers of one model, their costs, and the tensors that pass between them.

    profiles: what was measured of them, one for each device, dtype and load.
    """

    __pydantic_config__: ClassVar = STRICT

    meshwright: Literal["LayerGraph"] = "LayerGraph"
    version: Literal[1] = VERSION
    name: Annotated[str, Len(1, 200)]
    kinds: dict[Name, LayerKind]
    layers: Annotated[tuple[Layer, ...], Len(1, 20_000)]
    edges: tuple[Edge, ...] = ()
    ties: tuple[Tie, ...] = ()
    sample: Literal["tokens", "images", "features"] = "tokens"
    max_seq_len: Annotated[int, Ge(1)] | None = None
    fixed_seq_len: Annotated[int, Ge(1)] | None = None
    source: ModelSource = field(default_factory=ModelSource)
    profiles: Annotated[tuple[Profile, ...], MaxLen(64)] = ()

    def __post_init__(self) -> None:
        problems = [f"layer {i} ({layer.name}) is of kind {layer.kind!r}, which is not in `kinds`"
                    for i, layer in enumerate(self.layers) if layer.kind not in self.kinds]
        count = len(self.layers)
        for edge in self.edges:
            if not edge.source < edge.target < count:
                problems.append(f"edge {edge.source} -> {edge.target} ({edge.tensor}): source must "
                                f"come before target, and both lie in 0..{count - 1}")
        for tie in self.ties:
            for index, name in tie.places:
                if index >= count or (not problems and name not in {
                        p.name for p in self.kinds[self.layers[index].kind].parameters}):
                    problems.append(f"tie: layer {index} has no parameter {name!r}")
        measured = {kind for profile in self.profiles for kind in profile.kinds()}
        unknown = sorted(measured - set(self.kinds))
        problems += [f"profiles: {kind!r} is not in `kinds`" for kind in unknown]
        if problems:
            raise ValueError("; ".join(problems[:8]))

    def kind_of(self, index: int) -> LayerKind:
        """The kind of layer `index`."""
        return self.kinds[self.layers[index].kind]

    def iter_parameters(self) -> Iterator[tuple[int, Parameter]]:
        """(layer index, parameter) of every distinct parameter; a tied one at its first place."""
        repeated = {place for tie in self.ties for place in tie.places[1:]}
        for index in range(len(self.layers)):
            for parameter in self.kind_of(index).parameters:
                if (index, parameter.name) not in repeated:
                    yield index, parameter

    @property
    def num_parameters(self) -> int:
        """Distinct parameters, tied ones counted once (as `sum(p.numel())` counts them)."""
        return sum(parameter.numel for _, parameter in self.iter_parameters())

    def forward_flops(self, micro_batch: int, seq_len: int) -> int:
        """FLOPs of one forward pass of `micro_batch` samples."""
        return sum(op.flops.at(micro_batch, seq_len)
                   for index in range(len(self.layers)) for op in self.kind_of(index).ops)

    def backward_flops(self, micro_batch: int, seq_len: int) -> int:
        """FLOPs of one backward pass of `micro_batch` samples, recompute not counted."""
        return sum(op.backward_flops.at(micro_batch, seq_len)
                   for index in range(len(self.layers)) for op in self.kind_of(index).ops)

    def graph(self) -> nx.MultiDiGraph:
        """The DAG of layers: nodes are indices with `name` and `kind`, edges carry `edge`."""
        import networkx as nx  # a quarter of a second that planning does not need

        graph = nx.MultiDiGraph(name=self.name)
        for index, layer in enumerate(self.layers):
            graph.add_node(index, name=layer.name, kind=layer.kind)
        for edge in self.edges:
            graph.add_edge(edge.source, edge.target, edge=edge)
        return graph
