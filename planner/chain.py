"""The model as a chain of runs: neighbouring layers that cost the same and cut the same.

Layers stand in the topological order of the LayerGraph. Cutting before layer c sends every tensor
made before c and read at or after c, so that a DAG (skip connections, an encoder that feeds each
decoder layer) is cut like a chain, with everything alive across the cut charged and carried.
"""

from __future__ import annotations

from dataclasses import dataclass

from profiler.layer_graph import NOTHING, Edge, Extent, LayerGraph

__all__ = ["Chain", "Crossing", "Run", "make_chain"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """What one cut carries, as (elements, bytes per element or None) of each tensor.

    `forward` is sent to the next stage, `backward` are the gradients that come back.
    """

    forward: tuple[tuple[Extent, int | None], ...]
    backward: tuple[tuple[Extent, int | None], ...]

    def bytes_at(self, micro_batch: int, seq_len: int, compute_bytes: int) -> tuple[int, int]:
        """(forward, backward) bytes of one micro-batch, undivided."""
        forward, backward = (
            sum(elements.at(micro_batch, seq_len) * (size or compute_bytes)
                for elements, size in tensors) for tensors in (self.forward, self.backward))
        return forward, backward


@dataclass(frozen=True, slots=True)
class Run:
    """`count` layers of one kind from `first` on.

    inside: what a cut between two of its layers carries (None for a single layer).
    after: what a cut behind its last layer carries (None at the end of the model).
    input: elements of the activations that its layers alone read: what one held whole gathers.
    tied: (group, parameter name) of each tied parameter of its layer; such a run has one layer.
    """

    kind: str
    first: int
    count: int
    inside: Crossing | None
    after: Crossing | None
    input: Extent = NOTHING
    tied: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """The runs in order, and for each group of tied parameters the elements it has."""

    runs: tuple[Run, ...]
    num_layers: int
    tied_places: tuple[tuple[tuple[int, str], ...], ...]

    @property
    def block_run(self) -> int | None:
        """The run that repeats, if only one does: the blocks of a transformer."""
        repeated = [index for index, run in enumerate(self.runs) if run.count > 1]
        return repeated[0] if len(repeated) == 1 else None

    def chunks(self, pp: int) -> list[int]:
        """Chunks per rank (> 1) that an interleaved schedule can have: equally many blocks in each
        stage, as Megatron-LM asks; its bubble shrinks by the number of chunks only then."""
        if self.block_run is None:
            return []
        blocks = self.runs[self.block_run].count
        return [v for v in range(2, blocks // pp + 1) if blocks % (pp * v) == 0]

    def crossing_before(self, layer: int) -> Crossing:
        """What a cut before `layer` carries."""
        for run in self.runs:
            last = run.first + run.count
            if layer == last and run.after is not None:
                return run.after
            if run.first < layer < last and run.inside is not None:
                return run.inside
        raise IndexError(f"no cut before layer {layer} of {self.num_layers}")


def _crossings(graph: LayerGraph) -> list[Crossing]:
    """The crossing before each layer 1..n-1, each tensor once however many layers read it."""
    last_reader: dict[tuple[int, str], int] = {}
    edge_of = {}
    for edge in graph.edges:
        key = (edge.source, edge.tensor)
        last_reader[key] = max(last_reader.get(key, 0), edge.target)
        edge_of[key] = edge
    starts: dict[int, list[tuple[int, str]]] = {}
    ends: dict[int, list[tuple[int, str]]] = {}
    for key, last in last_reader.items():
        starts.setdefault(key[0] + 1, []).append(key)
        ends.setdefault(last + 1, []).append(key)
    alive: dict[tuple[int, str], None] = {}
    crossings = []
    for layer in range(1, len(graph.layers)):
        for key in starts.get(layer, ()):
            alive[key] = None
        for key in ends.get(layer, ()):
            alive.pop(key, None)
        edges = sorted((edge_of[key] for key in alive), key=_size_order)
        crossings.append(Crossing(
            forward=tuple((e.elements, e.bytes_per_element) for e in edges),
            backward=tuple((e.elements, e.bytes_per_element) for e in edges if e.has_gradient)))
    return crossings


def _size_order(edge: Edge) -> tuple[object, ...]:
    """By what is sent, so that crossings which cost the same are equal."""
    return (edge.elements.fixed, edge.elements.per_sample, edge.bytes_per_element or 0,
            edge.has_gradient)


def _inputs(graph: LayerGraph) -> list[Extent]:
    """Per layer, the elements of differentiable inputs of the compute dtype that no other layer
    reads.

    A tensor that several layers read (an encoder's output) is one storage however many keep it.
    """
    readers: dict[tuple[int, str], set[int]] = {}
    for edge in graph.edges:
        readers.setdefault((edge.source, edge.tensor), set()).add(edge.target)
    inputs = [NOTHING] * len(graph.layers)
    for edge in graph.edges:
        alone = len(readers[edge.source, edge.tensor]) == 1
        if alone and edge.has_gradient and edge.bytes_per_element is None:
            inputs[edge.target] += edge.elements
    return inputs


def make_chain(graph: LayerGraph) -> Chain:
    """Group the layers of a graph into maximal runs."""
    crossings = _crossings(graph)
    tied: dict[int, list[tuple[int, str]]] = {}
    for group, tie in enumerate(graph.ties):
        for layer, name in tie.places:
            tied.setdefault(layer, []).append((group, name))
    runs: list[Run] = []
    inputs = _inputs(graph)
    first = 0
    total = len(graph.layers)
    while first < total:
        kind = graph.layers[first].kind
        last = first
        if first not in tied:
            inside = crossings[first] if first + 1 < total else None
            while (last + 1 < total and last + 1 not in tied and graph.layers[last + 1].kind == kind
                   and crossings[last] == inside and inputs[last + 1] == inputs[first]):
                last += 1
        runs.append(Run(
            kind=kind, first=first, count=last - first + 1,
            inside=crossings[first] if last > first else None,
            after=crossings[last] if last + 1 < total else None,
            input=inputs[first], tied=tuple(tied.get(first, ()))))
        first = last + 1
    return Chain(runs=tuple(runs), num_layers=total,
                 tied_places=tuple(tie.places for tie in graph.ties))
