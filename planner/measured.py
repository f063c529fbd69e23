"""Measured seconds and bytes of a LayerGraph's profiles, as the cost functions take them.

Between measured sizes, at one tensor-parallel degree:

    micro-batch b      t is linear in b between the two nearest
    sequence length s  t / s is linear in s between the two nearest (work per token plus attention)

Outside the measured sizes the analytic form is taken times what the nearest measured size took of
its own analytic form, and called extrapolated; a kind that was not measured at all is analytic.
Bytes go between sizes as seconds do; outside they are as traced, which is exact in both sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import log, sqrt

from planner.cost.compute import ComputeTimes, Shard, Source, layer_compute
from planner.measured_memory import BytesRow, bytes_row
from planner.request import Request
from profiler.device import Device
from profiler.layer_graph import LayerGraph
from profiler.profile import FrameSeconds, LayerSeconds, Profile, UpdateSeconds

__all__ = ["SOURCES", "MeasuredLayers", "choose_profile", "slowest"]

SOURCES: tuple[Source, ...] = ("measured", "extrapolated", "analytic")
"""From the best to the least known."""

Row = tuple[float, ...]
"""forward, backward, recompute selective, recompute full."""


def choose_profile(graph: LayerGraph, device: str, dtype: str, processes_per_host: int
                   ) -> Profile | None:
    """The profile of a device and dtype; of several, that of the nearest load, then the last."""
    found = [p for p in graph.profiles if p.device == device and p.dtype == dtype]
    return min(reversed(found), key=lambda p: abs(p.num_processes - processes_per_host),
               default=None)


class MeasuredLayers:
    """The measured seconds of every kind of layer on one device kind."""

    def __init__(self, graph: LayerGraph, profile: Profile | None) -> None:
        self.graph, self.profile = graph, profile
        self._whole = {name for name, kind in graph.kinds.items()
                       if all(op.split == "replicated" for op in kind.ops)}
        self._rows: dict[tuple[str, int], dict[int, dict[int, Row]]] = {}
        for row in profile.layers if profile is not None else ():
            by_length = self._rows.setdefault((row.kind, row.tensor_parallel), {})
            by_length.setdefault(row.seq_len, {})[row.micro_batch] = _values(row)
        self._accumulate = {(row.kind, row.tensor_parallel): row.accumulate_s
                            for row in (profile.layers if profile is not None else ())
                            if row.accumulate_s is not None}
        self._bytes: dict[tuple[str, int], dict[int, dict[int, Row]]] = {}
        for held in profile.memory if profile is not None else ():
            by_length = self._bytes.setdefault((held.kind, held.tensor_parallel), {})
            by_length.setdefault(held.seq_len, {})[held.micro_batch] = bytes_row(held)

    def times(self, kind: str, shard: Shard) -> ComputeTimes | None:
        """Seconds of one rank's share of a layer; None where they are not measured."""
        values = self._found(self._rows, kind, shard)
        if values is None:
            return None
        return replace(_times(values, "measured"), accumulate_s=self._accumulation(kind, shard))

    @property
    def wait_s_per_root(self) -> float:
        """What a process waits for the slowest after t seconds of work is about this times sqrt(t);
        0 where it was not measured.

        Processes drift apart by many small disturbances that know nothing of each other, so the
        spread grows with the root of the time since they last met, as of a random walk.
        """
        rows = [row for row in (self.profile.layers if self.profile is not None else ())
                if row.wait_s is not None]
        roots = sum(sqrt(max(0.0, part)) for row in rows for part in (
            row.forward_s, row.backward_s))
        return sum(row.wait_s or 0.0 for row in rows) / roots if roots else 0.0

    @property
    def accumulates(self) -> bool:
        """Whether adding gradients over micro-batches is measured."""
        return any(self._accumulate.values())

    def _accumulation(self, kind: str, shard: Shard) -> float:
        """It depends on the parameters alone; of the nearest degree, by how many a rank holds."""
        tp = 1 if kind in self._whole else shard.tp
        known = [degree for name, degree in self._accumulate if name == kind]
        if not known:
            return 0.0
        nearest = min(known, key=lambda degree: abs(log(degree / tp)))
        return self._accumulate[kind, nearest] * nearest / tp

    def memory(self, kind: str, shard: Shard) -> BytesRow | None:
        """Bytes of one rank's share of a layer; None where they are not measured."""
        return self._found(self._bytes, kind, shard)

    def _found(self, table: dict[tuple[str, int], dict[int, dict[int, Row]]], kind: str,
               shard: Shard) -> Row | None:
        tp = 1 if kind in self._whole else shard.tp
        if tp > 1 and not shard.sequence_parallel:
            return None  # shards are measured with sequence parallelism
        by_length = table.get((kind, tp))
        return _at_length(by_length, shard.seq_len, shard.micro_batch) if by_length else None

    def frame_s(self, shard: Shard) -> float:
        """Seconds of the model's forward before a stage's own layers; 0 where they were not
        measured.

        They hardly depend on the size: of the nearest measured degree and length, linear in the
        micro-batch between the measured ones, and as at the nearest outside of them.
        """
        rows = self.profile.frames if self.profile is not None else ()
        if not rows:
            return 0.0

        def distance(row: FrameSeconds) -> tuple[float, float]:
            return (abs(log(row.tensor_parallel / shard.tp)), abs(log(row.seq_len / shard.seq_len)))
        nearest = min(map(distance, rows))
        by_batch: dict[int, Row] = {row.micro_batch: (row.forward_s,) for row in rows
                                    if distance(row) == nearest}
        found = _at_batch(by_batch, min(max(shard.micro_batch, min(by_batch)), max(by_batch)))
        assert found is not None
        return found[0]

    def temporary_bytes(self, request: Request) -> float | None:
        """What the optimizer step allocates for one parameter, if it is measured."""
        update = self.update(request)
        return None if update is None else update.temporary_bytes / update.num_parameters

    @property
    def context_bytes(self) -> int | None:
        """What a process holds of the device before it allocates, if it is measured."""
        return (self.profile.context_bytes or None) if self.profile is not None else None

    def seconds(self, kind: str, shard: Shard, device: Device) -> ComputeTimes:
        """Seconds of one rank's share of a layer, by the best that is known."""
        measured = self.times(kind, shard)
        if measured is not None:
            return measured
        analytic = layer_compute(self.graph.kinds[kind], shard, device)
        near = self._nearest(kind, shard)
        if near is None:
            return analytic
        other, values = near
        its_own = layer_compute(self.graph.kinds[kind], other, device)
        forward, backward, selective, full = (
            value * (ours / theirs if theirs > 0 else 1.0) for value, ours, theirs in
            zip(values, _row(analytic), _row(its_own), strict=True))
        return replace(_times((forward, backward, selective, full), "extrapolated"),
                       accumulate_s=self._accumulation(kind, shard))

    def _nearest(self, kind: str, shard: Shard) -> tuple[Shard, Row] | None:
        """The measured size that is nearest by ratios, a degree counting twice."""
        best: tuple[float, Shard, Row] | None = None
        for (name, tp), by_length in self._rows.items():
            if name != kind:
                continue
            for seq_len, by_batch in by_length.items():
                for micro_batch, values in by_batch.items():
                    distance = (2 * abs(log(tp / shard.tp)) + abs(log(seq_len / shard.seq_len))
                                + abs(log(micro_batch / shard.micro_batch)))
                    if best is None or distance < best[0]:
                        best = distance, replace(shard, tp=tp, seq_len=seq_len,
                                                 micro_batch=micro_batch,
                                                 sequence_parallel=tp > 1), values
        return None if best is None else best[1:]

    def update(self, request: Request) -> UpdateSeconds | None:
        """The optimizer step of a request, if it is measured."""
        stored = {4: "float32", 2: "bfloat16"}[request.bytes.stored_bytes]
        for update in self.profile.updates if self.profile is not None else ():
            if (update.optimizer, update.stored_dtype, update.fused) == (
                    request.optimizer, stored, request.fused_optimizer):
                return update
        return None


def slowest(times: Sequence[ComputeTimes]) -> ComputeTimes:
    """Of one layer on several device kinds: the most of each part, and the worst source."""
    if len(times) == 1:
        return times[0]
    names = [name for name in ComputeTimes.__dataclass_fields__ if name != "source"]
    return ComputeTimes(source=max((t.source for t in times), key=SOURCES.index),
                        **{name: max(getattr(t, name) for t in times) for name in names})


def _times(values: Row, source: Source) -> ComputeTimes:
    forward, backward, selective, full = values
    return ComputeTimes(forward_s=forward, backward_s=backward, recompute_selective_s=selective,
                        recompute_full_s=full, source=source)


def _row(times: ComputeTimes) -> Row:
    return (times.forward_s, times.backward_s, times.recompute_selective_s,
            times.recompute_full_s)


def _values(row: LayerSeconds) -> Row:
    return row.forward_s, row.backward_s, row.recompute_selective_s, row.recompute_full_s


def _neighbours(known: Sequence[int], wanted: int) -> tuple[int, int] | None:
    """The nearest known sizes below and above; the same twice if it is known itself."""
    place = bisect_left(known, wanted)
    if place < len(known) and known[place] == wanted:
        return wanted, wanted
    if 0 < place < len(known):
        return known[place - 1], known[place]
    return None


def _between(low: Row, high: Row, weight: float) -> Row:
    return tuple((1 - weight) * x + weight * y for x, y in zip(low, high, strict=True))


def _at_batch(by_batch: dict[int, Row], micro_batch: int) -> Row | None:
    found = _neighbours(sorted(by_batch), micro_batch)
    if found is None:
        return None
    low, high = found
    if low == high:
        return by_batch[low]
    return _between(by_batch[low], by_batch[high], (micro_batch - low) / (high - low))


def _at_length(by_length: dict[int, dict[int, Row]], seq_len: int, micro_batch: int
               ) -> Row | None:
    found = _neighbours(sorted(by_length), seq_len)
    if found is None:
        return None
    low, high = found
    rows = [_at_batch(by_length[length], micro_batch) for length in found]
    if rows[0] is None or rows[1] is None or low == high:
        return rows[0] if low == high else None
    per_token = _between(_scaled(rows[0], 1 / low), _scaled(rows[1], 1 / high),
                         (seq_len - low) / (high - low))
    return _scaled(per_token, seq_len)


def _scaled(row: Row, factor: float) -> Row:
    return tuple(value * factor for value in row)
