"""Hand-tuned layouts: what a good engineer would write down for a model and a cluster.

`recipes.json` says them as data, each from a named source. A degree is a number or a word:

    rest    every device that the other axes leave
    host    the devices of one host
    fit     the fewest with which the layout fits in memory

A micro-batch is `largest` (the largest that fits: what a sweep by hand finds), `smallest` (one
sample) or `whole` (all of a rank's samples at once). The ways to recompute are tried in order until
one fits. Stages have equally many layers, as nearly as their number allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from planner.costing import Candidate, Coster
from planner.layout import Choice, LayerRun, Layout, Mesh, Reference, Schedule, Stage
from planner.legality import violations
from planner.pricing import predict
from planner.problem import choices_for
from planner.space import divisors
from profiler.documents import digest

__all__ = ["AXES", "Entry", "Recipe", "apply", "load_recipes"]

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to lay out a run by hand; degrees as the module says."""

    name: str
    source: str
    pp: int | str = 1
    dp_replicate: int | str = 1
    dp_shard: int | str = 1
    tp: int | str = 1
    micro_batch: int | str = "largest"
    schedule: str = "1f1b"
    recompute: tuple[str, ...] = ("none", "full")
    reshard: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What came of a recipe: a layout with its prediction, or why there is none."""

    recipe: Recipe
    layout: Layout | None = None
    problem: str = ""


def load_recipes(path: Path | None = None) -> list[Recipe]:
    """The recipes of a file, by default those of the module."""
    data = json.loads((path or Path(__file__).with_name("recipes.json")).read_text())
    known = {field.name for field in fields(Recipe)}
    for row in data:
        if unknown := set(row) - known:
            raise ValueError(f"recipe {row.get('name')!r}: unknown keys {sorted(unknown)}")
    return [Recipe(**{**row, "recompute": tuple(row.get("recompute", ("none", "full")))})
            for row in data]


def apply(recipe: Recipe, coster: Coster, model: str, topology: str) -> Entry:
    """The first layout of a recipe that is legal and fits, in the order an engineer would try.

    model, topology: the names under which the layout finds them again.
    """
    illegal: list[str] = []
    overflow: str = ""
    for layout in _attempts(recipe, coster, model, topology):
        problems = violations(coster, layout)
        if problems:
            illegal = illegal or problems
            continue
        layout = predict(coster, layout)
        short = _short_of(layout)
        if not short:
            return Entry(recipe=recipe, layout=layout)
        overflow = short  # of the last attempt, the smallest
    return Entry(recipe=recipe, problem=overflow or "; ".join(illegal[:2])
                 or "no degrees for these devices")


def _short_of(layout: Layout) -> str:
    assert layout.prediction is not None
    over = max(stage.total_memory_bytes - stage.capacity_bytes
               for stage in layout.prediction.stages)
    return f"{over / 2**30:.2f} GiB too much on its fullest device" if over > 0 else ""


def _attempts(recipe: Recipe, coster: Coster, model: str, topology: str) -> Iterator[Layout]:
    request = coster.request
    for mesh in _meshes(recipe, coster):
        if request.global_batch % mesh.dp:
            continue
        local = request.global_batch // mesh.dp
        for recompute in recipe.recompute:
            for micro_batch in _micro_batches(recipe, local):
                yield Layout(
                    model=Reference(name=model, digest=digest(coster.graph)),
                    topology=Reference(name=topology, digest=digest(coster.topology)),
                    request=request, mesh=mesh, micro_batch=micro_batch,
                    num_micro_batches=local // micro_batch, schedule=_schedule(recipe, mesh),
                    stages=_stages(recipe, coster, mesh, recompute))


def _meshes(recipe: Recipe, coster: Coster) -> Iterator[Mesh]:
    total = coster.topology.num_devices
    host = min(group.devices_per_host for group in coster.topology.hosts)
    known: dict[str, Any] = {axis: getattr(recipe, axis) for axis in AXES}
    known = {axis: host if degree == "host" else degree for axis, degree in known.items()}
    fitted = [axis for axis, degree in known.items() if degree == "fit"]
    for number in divisors(total) if fitted else [1]:
        degrees = {axis: number if degree == "fit" else degree for axis, degree in known.items()}
        taken = prod(d for d in degrees.values() if d != "rest")
        if total % taken:
            continue
        degrees = {axis: total // taken if d == "rest" else d for axis, d in degrees.items()}
        yield Mesh(**degrees)


def _micro_batches(recipe: Recipe, local: int) -> list[int]:
    if isinstance(recipe.micro_batch, int):
        return [recipe.micro_batch] if local % recipe.micro_batch == 0 else []
    return {"smallest": [1], "whole": [local],
            "largest": list(reversed(divisors(local)))}[recipe.micro_batch]


def _schedule(recipe: Recipe, mesh: Mesh) -> Schedule:
    if mesh.pp > 1:
        return Schedule(name=recipe.schedule)  # type: ignore[arg-type]
    # FSDP reduces after every micro-batch unless told otherwise.
    return Schedule(gradient_sync="each_micro_batch" if mesh.dp_shard > 1 else "last_micro_batch")


def _stages(recipe: Recipe, coster: Coster, mesh: Mesh, recompute: str) -> tuple[Stage, ...]:
    """Equally many layers a stage; a layer that cannot be divided is held whole."""
    candidate = Candidate(mesh=mesh, micro_batch=1, num_micro_batches=1, schedule=Schedule())
    wanted = Choice(recompute=recompute, reshard=recipe.reshard)  # type: ignore[arg-type]
    of_layer: list[Choice] = []
    for run in coster.chain.runs:
        legal = choices_for(coster, replace(run, tied=()), candidate)
        choice = replace(wanted, reshard=recipe.reshard and mesh.dp_shard > 1)
        if choice not in legal:
            choice = replace(choice, tensor_parallel=False)
        if run.tied:
            choice = replace(choice, reshard=False)
        of_layer += [choice] * run.count
    count = len(of_layer)
    ends = [count * (k + 1) // mesh.pp for k in range(mesh.pp)]
    stages, start = [], 0
    for end in ends:
        runs: list[LayerRun] = []
        for layer in range(start, end):
            if runs and runs[-1].choice == of_layer[layer]:
                runs[-1] = replace(runs[-1], num_layers=runs[-1].num_layers + 1)
            else:
                runs.append(LayerRun(first_layer=layer, num_layers=1, choice=of_layer[layer]))
        stages.append(Stage(runs=tuple(runs)))
        start = end
    return tuple(stages)
