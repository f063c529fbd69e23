"""Every layout of a small space, priced one by one: what the search has to agree with.

Written from the definition of the space, not from the search: of the planner it uses the cost
model (costing, cost/, pricing) and the records, and nothing that bounds, cuts, fills, dominates or
solves.

    candidates      degrees x placements x micro-batches x schedules
    every_layout    of one candidate: all cuts x all choices, to be priced one by one by `evaluate`
    least_step      of one candidate: the same minimum from sums per rank, `brute_force_sums.py`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement, permutations, product
from math import inf, prod

from planner.chain import Crossing, Run
from planner.costing import Candidate, Coster, CutCost
from planner.layout import Choice, Mesh, Schedule
from planner.pricing import evaluate
from profiler.layer_graph import Extent, LayerKind
from tests.planner.brute_force_sums import Sums

__all__ = ["Best", "BruteForce"]

Segments = list[list[tuple[int, int, Choice]]]


@dataclass(frozen=True, slots=True)
class Best:
    """The least step time of an instance and a candidate that reaches it."""

    step_s: float
    candidate: Candidate | None
    num_candidates: int


class BruteForce:
    """The space of one Coster."""

    def __init__(self, coster: Coster) -> None:
        self.coster, self.graph, self.request = coster, coster.graph, coster.request
        self.num_layers = len(self.graph.layers)
        tied: dict[int, list[tuple[int, str]]] = {}
        for group, tie in enumerate(self.graph.ties):
            for layer, name in tie.places:
                tied.setdefault(layer, []).append((group, name))
        self.layers = [Run(kind=layer.kind, first=i, count=1, inside=None, after=None,
                           input=self._input(i), tied=tuple(tied.get(i, ())))
                       for i, layer in enumerate(self.graph.layers)]
        self.crossings = [self._crossing(end) for end in range(1, self.num_layers)]
        self.blocks = self._blocks()
        self.sums = Sums(self)

    # --- the model

    def _crossing(self, end: int) -> Crossing:
        """The tensors made before layer `end` and read there or later."""
        alive = {(e.source, e.tensor): e for e in self.graph.edges
                 if e.source < end <= e.target}
        return Crossing(
            forward=tuple((e.elements, e.bytes_per_element) for e in alive.values()),
            backward=tuple((e.elements, e.bytes_per_element) for e in alive.values()
                           if e.has_gradient))

    def _input(self, layer: int) -> Extent:
        """The differentiable activations that this layer alone reads."""
        total = Extent()
        for edge in self.graph.edges:
            readers = {e.target for e in self.graph.edges
                       if (e.source, e.tensor) == (edge.source, edge.tensor)}
            if readers == {layer} and edge.has_gradient and edge.bytes_per_element is None:
                total += edge.elements
        return total

    def _blocks(self) -> tuple[int, int] | None:
        """(first, number) of the layers that repeat, if only one run of equal layers does."""
        runs = []
        first = 0
        for end in range(1, self.num_layers + 1):
            if end < self.num_layers and (
                    self.graph.layers[end].kind == self.graph.layers[first].kind
                    and not self.layers[first].tied and not self.layers[end].tied
                    and self.layers[first].input == self.layers[end].input
                    and self._sorted(end) == self._sorted(first + 1)):
                continue
            runs.append((first, end - first))
            first = end
        repeated = [run for run in runs if run[1] > 1]
        return repeated[0] if len(repeated) == 1 else None

    def _sorted(self, end: int) -> tuple[list[object], ...]:
        crossing = self.crossings[end - 1]
        return tuple(sorted(map(repr, side)) for side in (crossing.forward, crossing.backward))

    # --- candidates

    def candidates(self) -> Iterator[Candidate]:
        topology, request = self.coster.topology, self.request
        devices = topology.num_devices
        degrees = range(1, devices + 1)
        for tp, shard, replicate, pp in product(degrees, repeat=4):
            size, dp = tp * shard * replicate * pp, shard * replicate
            if size > devices or pp > self.num_layers or request.global_batch % dp:
                continue
            if request.use_all_devices and size < devices:
                continue
            asked = ((request.tp, tp), (request.dp_shard, shard),
                     (request.dp_replicate, replicate), (request.pp, pp))
            if any(wanted not in (None, has) for wanted, has in asked) or not self._legal_tp(tp):
                continue
            local = request.global_batch // dp
            for batch in range(1, local + 1):
                if local % batch or request.micro_batch not in (None, batch):
                    continue
                for schedule in self._schedules(pp, local // batch, shard):
                    for mesh in self._meshes(pp, replicate, shard, tp):
                        yield Candidate(mesh=mesh, micro_batch=batch, schedule=schedule,
                                        num_micro_batches=local // batch)

    def _legal_tp(self, tp: int) -> bool:
        """Whether a degree divides the sequence and layers with half of the FLOPs."""
        if tp == 1:
            return True
        if self.graph.sample not in self.coster.capabilities.tensor_parallel_samples:
            return False
        if self.graph.sample == "tokens" and self.request.seq_len % tp:
            return False
        if not any(kind.tensor_parallel and max(kind.tensor_parallel.divides.values()) >= tp
                   for kind in self.graph.kinds.values()):
            return False
        work = [(sum(op.flops.at(1, self.request.seq_len) for op in kind.ops),
                 kind.tensor_parallel is not None and self._divides(kind, tp))
                for layer in self.graph.layers for kind in [self.graph.kinds[layer.kind]]]
        total = sum(flops for flops, _ in work)
        return total > 0 and 2 * sum(flops for flops, divided in work if divided) >= total

    def _divides(self, kind: LayerKind, tp: int) -> bool:
        assert kind.tensor_parallel is not None
        return all(size % tp == 0 for name, size in kind.tensor_parallel.divides.items()
                   if name != "vocabulary")

    def _schedules(self, pp: int, m: int, shard: int) -> Iterator[Schedule]:
        target = self.coster.capabilities
        each = pp == 1 or target.gradient_sync_per_micro_batch_with_pipeline
        syncs = ["last_micro_batch"] + ["each_micro_batch"] * (each and shard > 1)
        named = [("gpipe", 1)]
        if m >= pp or target.min_micro_batches_1f1b == "one":
            named.append(("1f1b", 1))
        if pp > 1 and m % pp == 0 and self.blocks is not None:
            named += [("interleaved", v) for v in range(2, self.num_layers + 1)
                      if self.blocks[1] % (pp * v) == 0]
        for name, chunks in named:
            for sync in syncs:
                if self.request.schedule in (None, name):
                    yield Schedule(name=name, chunks=chunks,  # type: ignore[arg-type]
                                   gradient_sync=sync)  # type: ignore[arg-type]

    def _meshes(self, pp: int, replicate: int, shard: int, tp: int) -> Iterator[Mesh]:
        degrees = {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "tp": tp}
        active = [axis for axis, degree in degrees.items() if degree > 1]
        for groups in permutations(range(len(self.coster.topology.hosts))):
            for order in permutations(active):
                yield Mesh(**degrees, order=order, host_groups=groups)  # type: ignore[arg-type]

    def choices(self, layer: int, candidate: Candidate) -> list[Choice]:
        """Every choice of one layer."""
        mesh, kind = candidate.mesh, self.graph.kind_of(layer)
        tied, target = bool(self.layers[layer].tied), self.coster.capabilities
        recompute = [mode for mode in ("none", "selective", "full")
                     if self.request.recompute in (None, mode)]
        reshard = [False] if tied or mesh.dp_shard == 1 else [True, False]
        if not target.reshard_per_layer:
            reshard = reshard[:1]
        divided = [True]
        if mesh.tp > 1 and kind.tensor_parallel is not None:
            divided = [False]
            if self._divides(kind, mesh.tp):
                divided = [True, False]
            if tied or not target.tensor_parallel_per_layer:
                divided = divided[:1]
        return [Choice(recompute=r, reshard=s, tensor_parallel=t)  # type: ignore[arg-type]
                for r, s, t in product(recompute, reshard, divided)]

    # --- cuts

    def cuts(self, candidate: Candidate) -> Iterator[tuple[int, ...]]:
        """The ends of all stages but the last; interleaved stages have equally many blocks."""
        p, v = candidate.mesh.pp, candidate.schedule.chunks
        if v > 1:
            assert self.blocks is not None
            first, count = self.blocks
            yield tuple(first + count // (p * v) * k for k in range(1, p * v))
            return
        yield from combinations(range(1, self.num_layers), p - 1)

    def cut(self, end: int, candidate: Candidate, sender: int) -> CutCost:
        return self.coster.cut(self.crossings[end - 1], candidate, sender)

    # --- one layout after the other

    def every_layout(self, candidate: Candidate) -> Iterator[Segments]:
        """All cuts and all choices, those of equal layers as counts."""
        of_layer = [r for r, run in enumerate(self.coster.chain.runs) for _ in range(run.count)]
        for ends in self.cuts(candidate):
            parts: list[list[list[tuple[int, int, Choice]]]] = []
            stage_of_part = []
            start = 0
            for stage, end in enumerate((*ends, self.num_layers)):
                for r in dict.fromkeys(of_layer[start:end]):
                    n = of_layer[start:end].count(r)
                    options = self.choices(of_layer.index(r), candidate)
                    parts.append([[(r, picked.count(choice), choice)
                                   for choice in dict.fromkeys(picked)]
                                  for picked in combinations_with_replacement(options, n)])
                    stage_of_part.append(stage)
                start = end
            for picks in product(*parts):
                segments: Segments = [[] for _ in range(len(ends) + 1)]
                for stage, picked in zip(stage_of_part, picks, strict=True):
                    segments[stage] += picked
                yield segments

    def size(self, candidate: Candidate) -> int:
        """About how many layouts `every_layout` yields."""
        each = prod(len(self.choices(layer, candidate)) for layer in range(self.num_layers))
        return each * sum(1 for _ in self.cuts(candidate))

    def priced_least_step(self, candidate: Candidate) -> float:
        """The least step of a candidate, every layout priced by `evaluate`."""
        return min((priced.step_s for segments in self.every_layout(candidate)
                    if (priced := evaluate(self.coster, candidate, segments)).fits), default=inf)

    # --- everything

    def best(self) -> Best:
        """The minimum over the whole space."""
        best_s, best, number = inf, None, 0
        for candidate in self.candidates():
            number += 1
            step_s = self.sums.least_step(candidate)
            if step_s < best_s:
                best_s, best = step_s, candidate
        return Best(best_s, best, number)
