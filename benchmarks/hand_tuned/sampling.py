"""A random sample of legal layouts: degrees, placement, schedule, cuts and choices drawn alike."""

from __future__ import annotations

import random
from dataclasses import replace

from planner.costing import Candidate, Coster
from planner.layout import Choice, LayerRun, Layout, Reference, Stage
from planner.legality import violations
from planner.pricing import predict
from planner.problem import choices_for
from planner.space import Row, candidates, meshes, rows
from profiler.documents import digest

__all__ = ["key_of", "sample"]

TRIES = 400


def key_of(layout: Layout) -> tuple[object, ...]:
    """What makes two layouts the same run, whatever they are called."""
    mesh = layout.mesh
    order = tuple(axis for axis in mesh.order if mesh.degree(axis) > 1)
    degrees = tuple(mesh.degree(axis) for axis in order)
    choices = tuple((layer, replace(choice, reshard=choice.reshard and mesh.dp_shard > 1,
                                    tensor_parallel=choice.tensor_parallel and mesh.tp > 1))
                    for stage in layout.stages for layer, choice in stage.iter_layers())
    cuts = tuple(stage.first_layer for stage in layout.stages)
    schedule = layout.schedule if mesh.pp > 1 else None
    sync = layout.schedule.gradient_sync if layout.num_micro_batches > 1 else None
    return (order, degrees, mesh.host_groups, layout.micro_batch, schedule, sync, cuts, choices)


def sample(coster: Coster, model: Reference, topology: Reference, *, count: int, seed: int,
           slowest_s: float, taken: set[tuple[object, ...]]) -> list[Layout]:
    """Up to `count` other legal layouts on all devices that fit, the same for the same seed.

    slowest_s: those predicted to take longer are left out: running them would show nothing.
    taken: keys of layouts that run anyway.
    """
    generator = random.Random(seed)
    by_degrees: dict[tuple[int, int, int], list[Row]] = {}
    for row in (Row(*map(int, values)) for values in zip(*rows(coster).values(), strict=True)):
        if row.tp * row.pp * row.dp == coster.topology.num_devices:
            by_degrees.setdefault((row.tp, row.pp, row.dp), []).append(row)
    found: list[Layout] = []
    for _ in range(TRIES):
        if len(found) == count or not by_degrees:
            break
        row = generator.choice(by_degrees[generator.choice(sorted(by_degrees))])
        mesh = generator.choice([m for m in meshes(coster, row) if not m.host_groups] or [None])
        options = list(candidates(coster, row, mesh)) if mesh is not None else []
        if not options:
            continue
        layout = _drawn(coster, generator.choice(options), generator, model, topology)
        if key_of(layout) in taken or violations(coster, layout):
            continue
        layout = predict(coster, layout)
        prediction = layout.prediction
        assert prediction is not None
        if prediction.step_s <= slowest_s and all(
                stage.total_memory_bytes <= stage.capacity_bytes for stage in prediction.stages):
            taken.add(key_of(layout))
            found.append(layout)
    return found


def _drawn(coster: Coster, candidate: Candidate, generator: random.Random, model: Reference,
           topology: Reference) -> Layout:
    """A candidate with cuts near equal ones, and one choice for each run of equal layers."""
    mesh = candidate.mesh
    count, pieces = coster.chain.num_layers, mesh.pp * candidate.schedule.chunks
    if candidate.schedule.chunks > 1:
        ends = _interleaved_ends(coster, pieces)
    else:
        ends = [count * (k + 1) // pieces for k in range(pieces)]
        for k in range(pieces - 1):
            low, high = (ends[k - 1] if k else 0) + 1, ends[k + 1] - 1
            ends[k] = min(max(low, ends[k] + generator.choice((-1, 0, 0, 1))), high)
    recompute = generator.choice(("none", "none", "selective", "full"))
    reshard = generator.random() < 0.5
    choices: list[Choice] = []
    for run in coster.chain.runs:
        wanted = Choice(recompute=recompute, reshard=reshard and mesh.dp_shard > 1)  # type: ignore[arg-type]
        legal = choices_for(coster, replace(run, tied=()), candidate)
        if wanted not in legal:
            wanted = replace(wanted, tensor_parallel=False)
        choices += [replace(wanted, reshard=False) if run.tied else wanted] * run.count
    stages, start = [], 0
    for end in ends:
        stages.append(Stage(runs=tuple(LayerRun(first_layer=layer, num_layers=1,
                                                choice=choices[layer])
                                       for layer in range(start, end))))
        start = end
    return Layout(model=model, topology=topology, request=coster.request, mesh=mesh,
                  micro_batch=candidate.micro_batch,
                  num_micro_batches=candidate.num_micro_batches, schedule=candidate.schedule,
                  stages=tuple(stages))


def _interleaved_ends(coster: Coster, pieces: int) -> list[int]:
    """Equally many blocks a stage; what is before and after them goes with the first and last."""
    assert coster.chain.block_run is not None
    runs, block = coster.chain.runs, coster.chain.block_run
    first = sum(run.count for run in runs[:block])
    each = runs[block].count // pieces
    return [first + each * (k + 1) for k in range(pieces - 1)] + [coster.chain.num_layers]


def reference(name: str, document: object) -> Reference:
    """How a layout finds a document again."""
    return Reference(name=name, digest=digest(document))
