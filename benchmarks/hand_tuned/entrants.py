"""Who runs in a contest: the plan, every legal hand-tuned layout, and a random sample of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.hand_tuned.recipes import apply, load_recipes
from benchmarks.hand_tuned.sampling import key_of, reference, sample
from planner import inputs, link_fits, search, topology_files
from planner.costing import Coster
from planner.layout import Layout
from planner.pricing import predict

__all__ = ["PLAN", "Entrant", "Field", "make_field"]

PLAN = "the plan"
SLOWEST = 2.0
"""Random layouts predicted to take longer than this many times the plan are not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A layout and the names of all that ask for it. kind: plan, hand, random."""

    names: tuple[str, ...]
    kind: str
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """All entrants, the plan first; refused: recipes that give no layout, with the reason."""

    entrants: tuple[Entrant, ...]
    refused: tuple[tuple[str, str], ...]


def make_field(model: str, topology: str, links: str | None, request_fields: Mapping[str, Any],
               *, num_random: int, seed: int = 0, only_plan: bool = False) -> Field:
    """Plan, and find every other layout that runs beside it (unless there is to be none).

    model, topology, links: names or files; each layout finds them again under these names.
    """
    graph, name = inputs.resolve_model(model)
    devices = topology_files.resolve(topology)
    if links is not None:
        devices = link_fits.with_links(devices, links)
    request = inputs.make_request(graph, {**request_fields, "use_all_devices": True})
    plan = search.search(graph, devices, request, model_name=name, topology_name=topology)
    if only_plan:
        return Field(entrants=(Entrant(names=(PLAN,), kind="plan", layout=plan),), refused=())
    coster = Coster(graph, devices, request)
    model_reference, topology_reference = reference(name, graph), reference(topology, devices)
    found: dict[tuple[object, ...], Entrant] = {
        key_of(plan): Entrant(names=(PLAN,), kind="plan", layout=plan)}
    refused = []
    for recipe in load_recipes():
        entry = apply(recipe, coster, name, topology)
        if entry.layout is None:
            refused.append((recipe.name, entry.problem))
            continue
        layout = replace(entry.layout, model=model_reference, topology=topology_reference)
        key = key_of(layout)
        before = found.get(key, Entrant(names=(), kind="hand", layout=layout))
        found[key] = replace(before, names=(*before.names, recipe.name))
    assert plan.prediction is not None
    drawn = sample(coster, model_reference, topology_reference, count=num_random, seed=seed,
                   slowest_s=SLOWEST * plan.prediction.step_s, taken=set(found))
    found |= {key_of(layout): Entrant(names=(f"random {i + 1}",), kind="random",
                                      layout=predict(coster, layout))
              for i, layout in enumerate(drawn)}
    return Field(entrants=tuple(found.values()), refused=tuple(refused))
