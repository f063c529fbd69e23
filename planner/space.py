"""The space of candidates: every mesh, micro-batch and schedule that is legal for a request.

Level 1 is a table of (tp, pp, dp, micro-batch), built and bounded with numpy; level 2 expands one
row into meshes: the split of dp into replicas and shards, and how the axes lie over the devices (of
placements that no cost can tell apart one is kept); level 3 a mesh into candidates: schedules and
chunks, and when gradients are reduced.

Left out because another candidate is never slower and never needs more memory: GPipe where 1F1B is
legal, gradients reduced after each micro-batch where there is one micro-batch (and one stage) or
nothing is sharded.

Not in the space: interleaved stages with unequally many blocks, tensor-parallel degrees that do not
divide layers with half of the model's FLOPs, devices other than the first in an order of the host
groups. Stages of the other schedules are cut anywhere, and every layer has every choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from math import factorial, prod
from typing import Literal

import numpy as np

from planner.costing import Candidate, Coster
from planner.division import divisible, has_outside_parameters
from planner.layout import Axis, Mesh, Schedule
from profiler.errors import InvalidInput

__all__ = ["Row", "candidates", "divisors", "host_group_orders", "legal_tensor_degrees", "meshes",
           "model_limits", "needs_one_micro_batch", "rows", "space_size"]

MAX_GROUP_ORDERS = 24
"""Host-group orders tried: all of them up to four groups, else as listed, reversed and by speed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of level 1."""

    tp: int
    pp: int
    dp: int
    micro_batch: int
    num_micro_batches: int


def divisors(number: int) -> list[int]:
    """All divisors in increasing order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def legal_tensor_degrees(coster: Coster, most: int) -> list[int]:
    """Degrees up to `most` that divide layers with at least half of the model's FLOPs.

    The other layers are held whole. Sequence parallelism also needs the degree to divide the
    sequence.
    """
    graph, capabilities = coster.graph, coster.capabilities
    if graph.sample not in capabilities.tensor_parallel_samples or is_uncut(coster):
        return [1]
    work = {name: sum(op.flops.at(1, coster.seq_len) for op in kind.ops)
            for name, kind in graph.kinds.items()}
    counts = dict.fromkeys(graph.kinds, 0)
    for layer in graph.layers:
        counts[layer.kind] += 1
    total = sum(work[name] * counts[name] for name in work)
    sizes = {size for kind in graph.kinds.values() if kind.tensor_parallel
             for size in kind.tensor_parallel.divides.values()}
    legal = []
    for degree in range(1, min(most, max(sizes, default=1)) + 1):
        if degree > 1 and graph.sample == "tokens" and capabilities.sequence_parallel and (
                coster.seq_len % degree):
            continue
        divided = sum(work[name] * counts[name] for name, kind in graph.kinds.items()
                      if kind.tensor_parallel is not None
                      and not divisible(kind, degree, capabilities))
        if degree == 1 or (total and 2 * divided >= total):
            legal.append(degree)
    return legal


def is_uncut(coster: Coster) -> bool:
    """Whether the target can neither divide the model nor cut it into stages."""
    return not coster.capabilities.outside_parameters and has_outside_parameters(coster.graph)


def needs_one_micro_batch(coster: Coster) -> bool:
    """Whether statistics of the batch are only right in one micro-batch."""
    return not coster.capabilities.batch_statistics and any(
        kind.batch_statistics for kind in coster.graph.kinds.values())


def rows(coster: Coster) -> dict[str, np.ndarray]:
    """Level 1 as columns tp, pp, dp, micro_batch, num_micro_batches.

    Raises:
        InvalidInput: a demanded degree or schedule leaves nothing legal; with what would be.
    """
    request = coster.request
    devices, layers = coster.topology.num_devices, coster.chain.num_layers
    legal = legal_tensor_degrees(coster, devices)
    if request.tp is not None and request.tp not in legal:
        raise InvalidInput(_why_not_tp(coster, request.tp, legal))
    columns: list[tuple[int, int, int, int, int]] = []
    one_micro_batch, uncut = needs_one_micro_batch(coster), is_uncut(coster)
    fixed_dp = (request.dp_replicate or 1) * (request.dp_shard or 1)
    for tp in [request.tp] if request.tp else legal:
        for dp in divisors(request.global_batch):
            if dp * tp > devices or dp % fixed_dp:
                continue
            if request.dp_replicate and request.dp_shard and dp != fixed_dp:
                continue
            local = request.global_batch // dp
            batches = [b for b in ([local] if one_micro_batch else divisors(local))
                       if request.micro_batch in (None, b)]
            most = 1 if uncut else min(layers, devices // (tp * dp))
            for pp in [request.pp] if request.pp else range(1, most + 1):
                if pp > most or (request.use_all_devices and tp * dp * pp != devices):
                    continue
                columns += [(tp, pp, dp, b, local // b) for b in batches]
    if not columns:
        raise InvalidInput(_why_none(coster))
    if request.schedule is not None:
        columns = [row for row in columns if any(schedules(coster, Row(*row)))]
        if not columns:
            raise InvalidInput(_why_no_schedule(coster, request.schedule))
    table = np.array(columns, dtype=np.int64)
    return dict(zip(("tp", "pp", "dp", "micro_batch", "num_micro_batches"), table.T, strict=True))


def _why_not_tp(coster: Coster, tp: int, legal: list[int]) -> list[str]:
    problems = []
    if tp > coster.topology.num_devices:
        problems.append(f"{coster.topology.name} has {coster.topology.num_devices} devices")
    for kind in coster.graph.kinds.values():
        problems += divisible(kind, tp, coster.capabilities)
    problems += model_limits(coster, tp=tp, pp=1)
    if coster.seq_len % tp:
        problems.append(f"sequence length {coster.seq_len} is not divisible by {tp}")
    reasons = "; ".join(dict.fromkeys(problems)) or "no layer can be divided so"
    return [f"tp {tp} is not legal for {coster.graph.name}: {reasons}. "
            f"Legal: {', '.join(map(str, legal))}"]


def model_limits(coster: Coster, *, tp: int, pp: int) -> list[str]:
    """Why the target cannot divide a model so, or cut it into stages, whatever its sizes."""
    graph, capabilities, problems = coster.graph, coster.capabilities, []
    if tp > 1 and graph.sample not in capabilities.tensor_parallel_samples:
        problems.append(f"{capabilities.target} divides only models of "
                        f"{', '.join(capabilities.tensor_parallel_samples)}, and {graph.name} "
                        f"takes {graph.sample}")
    if (tp > 1 or pp > 1) and is_uncut(coster):
        problems.append(f"{graph.name} has parameters outside every layer, which "
                        f"{capabilities.target} can neither divide nor cut into stages")
    return problems


def _why_none(coster: Coster) -> list[str]:
    request, devices = coster.request, coster.topology.num_devices
    asked = {name: getattr(request, name) for name in
             ("pp", "dp_replicate", "dp_shard", "tp", "micro_batch")}
    asked = {name: value for name, value in asked.items() if value is not None}
    known = prod(v for k, v in asked.items() if k != "micro_batch")
    lines = []
    if known > devices:
        factors = " x ".join(f"{k} {v}" for k, v in asked.items() if k != "micro_batch")
        lines.append(f"{factors} = {known} devices; {coster.topology.name} has {devices}")
    batch = request.global_batch
    data = (request.dp_replicate or 1) * (request.dp_shard or 1)
    if batch % (data * (request.micro_batch or 1)):
        lines.append(
            f"global batch {batch} is not divisible by data-parallel degree {data} x micro-batch "
            f"{request.micro_batch or 1} = {data * (request.micro_batch or 1)}; "
            f"divisors of {batch}: {', '.join(map(str, divisors(batch)[:40]))}")
    if request.pp and request.pp > coster.chain.num_layers:
        lines.append(f"pp {request.pp} is more than the {coster.chain.num_layers} layers of "
                     f"{coster.graph.name}")
    lines += model_limits(coster, tp=1, pp=request.pp or 1)
    if needs_one_micro_batch(coster):
        lines.append(f"{coster.graph.name} normalizes by statistics of the batch: one micro-batch "
                     f"is legal, of {batch} / the data-parallel degree samples")
    if not lines and request.use_all_devices:
        lines.append(f"no legal degrees use all {devices} devices with global batch {batch}: the "
                     f"data-parallel degree must divide the batch, tp be legal, pp <= "
                     f"{coster.chain.num_layers}; without --use-all-devices fewer are used")
    return lines or [f"no legal layout has {asked} on {devices} devices"]


def _why_no_schedule(coster: Coster, name: str) -> str:
    block_run = coster.chain.block_run
    if name != "interleaved":
        return (f"schedule {name!r} is legal for none of the degrees: {coster.capabilities.target} "
                "runs it where there are as many micro-batches as stages")
    if block_run is None:
        return (f"schedule 'interleaved' needs one run of equal blocks, to spread them evenly; "
                f"{coster.graph.name} has none")
    blocks = coster.chain.runs[block_run].count
    return (f"schedule 'interleaved' is legal for none of the degrees: it needs pp of 2 or more, a "
            f"multiple of pp micro-batches, and pp x chunks (2 or more) that divides the {blocks} "
            f"blocks of {coster.graph.name}")


def host_group_orders(coster: Coster) -> list[tuple[int, ...]]:
    """Orders in which the host groups may be filled; () stands for as listed."""
    groups = coster.topology.hosts
    if len(groups) == 1:
        return [()]
    listed = tuple(range(len(groups)))
    orders = list(permutations(listed))
    if len(orders) > MAX_GROUP_ORDERS:
        def speed(index: int) -> float:
            return groups[index].device.peak(coster.request.bytes.dtype)
        by_speed = tuple(sorted(listed, key=lambda i: -speed(i)))
        orders = list(dict.fromkeys([listed, listed[::-1], by_speed, by_speed[::-1]]))
    return [() if order == listed else order for order in orders]


def schedules(coster: Coster, row: Row) -> Iterator[Schedule]:
    """Schedules of a row that can be part of a best answer."""
    wanted, legal = coster.request.schedule, coster.capabilities.schedules
    pp, m = row.pp, row.num_micro_batches
    one_f_one_b = "1f1b" in legal and (
        pp == 1 or m >= pp or coster.capabilities.min_micro_batches_1f1b == "one")
    if one_f_one_b and wanted in (None, "1f1b"):
        yield Schedule()
    if "gpipe" in legal and (wanted == "gpipe" or (wanted is None and not one_f_one_b)):
        yield Schedule(name="gpipe")
    multiple = coster.capabilities.interleaved_micro_batches == "any" or m % pp == 0
    if pp > 1 and "interleaved" in legal and multiple and wanted in (None, "interleaved"):
        for chunks in coster.chain.chunks(pp):
            yield Schedule(name="interleaved", chunks=chunks)


def meshes(coster: Coster, row: Row) -> Iterator[Mesh]:
    """The meshes of a row, in a fixed order; placements that cost the same once."""
    request = coster.request
    for shard in divisors(row.dp):
        replicate = row.dp // shard
        if request.dp_shard in (None, shard) and request.dp_replicate in (None, replicate):
            yield from placements(coster, row, replicate, shard)


def candidates(coster: Coster, row: Row, mesh: Mesh) -> Iterator[Candidate]:
    """The candidates of a row on a mesh: schedules, and when gradients are reduced."""
    syncs: list[Literal["last_micro_batch", "each_micro_batch"]] = ["last_micro_batch"]
    if _can_reduce_each(coster, row, mesh.dp_shard):
        syncs.append("each_micro_batch")
    for schedule in schedules(coster, row):
        for sync in syncs:
            yield Candidate(mesh=mesh, micro_batch=row.micro_batch,
                            num_micro_batches=row.num_micro_batches,
                            schedule=replace(schedule, gradient_sync=sync))


def _can_reduce_each(coster: Coster, row: Row, shard: int) -> bool:
    """Whether gradients can be reduced after each micro-batch, and that is of use: whole ones would
    be held otherwise."""
    if row.pp > 1:
        return shard > 1 and coster.capabilities.gradient_sync_per_micro_batch_with_pipeline
    return shard > 1 and row.num_micro_batches > 1


def space_size(coster: Coster, table: dict[str, np.ndarray]) -> int:
    """How many candidates the rows have, placements that cost the same included.

    Each candidate stands for every cut into stages and every choice of the layers.
    """
    request = coster.request
    parts = np.stack([table["dp"], table["pp"], np.minimum(table["tp"], 2),
                      table["num_micro_batches"]])
    unique, counts = np.unique(parts, axis=1, return_counts=True)
    splits: dict[tuple[int, int, bool, bool], int] = {}
    by_schedule: dict[tuple[int, int], int] = {}
    size = 0
    for (dp, pp, tp, m), number in zip(unique.T.tolist(), counts.tolist(), strict=True):
        row = Row(tp, pp, dp, 1, m)
        key = (dp, tp, pp > 1, m > 1)
        if key not in splits:
            splits[key] = sum(_orders(coster, row, shard) for shard in divisors(dp)
                              if request.dp_shard in (None, shard)
                              and request.dp_replicate in (None, dp // shard))
        if (pp, m) not in by_schedule:
            by_schedule[pp, m] = sum(1 for _ in schedules(coster, row))
        size += number * splits[key] * by_schedule[pp, m]
    return size * len(host_group_orders(coster))


def _orders(coster: Coster, row: Row, shard: int) -> int:
    """Orders of the axes times ways to synchronise gradients, for one split of dp."""
    active = sum(degree > 1 for degree in (row.pp, row.dp // shard, shard, row.tp))
    return factorial(active) * (2 if _can_reduce_each(coster, row, shard) else 1)


def placements(coster: Coster, row: Row, replicate: int, shard: int) -> list[Mesh]:
    """The meshes of these degrees that costs can tell apart."""
    key = (row.tp, row.pp, replicate, shard)
    if key not in coster.mesh_cache:
        coster.mesh_cache[key] = _placements(coster, row, replicate, shard)
    return coster.mesh_cache[key]


def _placements(coster: Coster, row: Row, replicate: int, shard: int) -> list[Mesh]:
    degrees = {"pp": row.pp, "dp_replicate": replicate, "dp_shard": shard, "tp": row.tp}
    active: list[Axis] = [axis for axis, degree in degrees.items()  # type: ignore[misc]
                          if degree > 1]
    seen: set[object] = set()
    meshes = []
    for groups in host_group_orders(coster):
        for order in permutations(active):
            mesh = Mesh(**degrees, order=order, host_groups=groups)
            contexts, of_rank = coster.contexts(mesh)
            signature = (tuple(map(id, contexts)), of_rank, coster.edge_signature(mesh))
            if signature not in seen:
                seen.add(signature)
                meshes.append(mesh)
    return meshes
