"""On paper: the hand-tuned layouts of a model and a cluster priced beside the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.hand_tuned.recipes import Entry, apply, load_recipes
from planner import inputs, search, topology_files
from planner.costing import Coster
from planner.layout import Layout
from planner.pricing import candidate_of
from profiler.documents import to_data

__all__ = ["Comparison", "as_data", "compare", "degrees", "print_comparison", "what_changed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The plan and what came of every recipe."""

    model: str
    topology: str
    plan: Layout
    entries: tuple[Entry, ...]


def compare(model: str, topology: str, **fields: object) -> Comparison:
    """Plan, and price every recipe; `fields` are of the Request."""
    graph, name = inputs.resolve_model(model)
    devices = topology_files.resolve(topology)
    request = inputs.make_request(graph, fields)
    plan = search.search(graph, devices, request, model_name=name, topology_name=topology)
    coster = Coster(graph, devices, request)
    entries = tuple(apply(recipe, coster, name, topology) for recipe in load_recipes())
    return Comparison(model=name, topology=topology, plan=plan, entries=entries)


def degrees(layout: Layout) -> str:
    """The mesh, micro-batch, schedule and recompute in a few words."""
    modes = {choice.recompute for stage in layout.stages for _, choice in stage.iter_layers()}
    again = "" if modes == {"none"} else f", recompute {'/'.join(sorted(modes - {'none'}))}"
    return search.describe(candidate_of(layout)) + again


def what_changed(plan: Layout, other: Layout) -> str:
    """The terms of the step that make most of the difference between the two."""
    assert plan.prediction is not None and other.prediction is not None
    mine, theirs = plan.prediction.step_terms_s, other.prediction.step_terms_s
    gaps = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in {*mine, *theirs}}
    largest = sorted(gaps, key=lambda name: -abs(gaps[name]))[:2]
    step_s = plan.prediction.step_s
    return ", ".join(f"{name.replace('_', ' ')} {100 * gaps[name] / step_s:+.1f} %"
                     for name in largest if abs(gaps[name]) > 1e-3 * step_s)


def as_data(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain data for JSON, with the layouts whole."""
    rows = [{"name": entry.recipe.name, "source": entry.recipe.source, "problem": entry.problem,
             "layout": None if entry.layout is None else to_data(entry.layout)}
            for entry in comparison.entries]
    return {"model": comparison.model, "topology": comparison.topology,
            "plan": to_data(comparison.plan), "recipes": rows}


def print_comparison(comparison: Comparison) -> None:
    """A table, fastest first; what does not run last, with the reason."""
    plan = comparison.plan
    assert plan.prediction is not None
    table = Table(title=f"{comparison.model} on {comparison.topology}, predicted", title_style="")
    for heading in ("layout", "degrees", "step s", "slower", "memory GiB", "what differs"):
        table.add_column(heading, justify="right" if heading in ("step s", "slower", "memory GiB")
                         else "left", overflow="fold")
    rows = [("the plan", plan)] + [
        (entry.recipe.name, entry.layout) for entry in comparison.entries
        if entry.layout is not None]
    for name, layout in sorted(rows, key=lambda row: row[1].prediction.step_s):  # type: ignore[union-attr]
        prediction = layout.prediction
        assert prediction is not None
        memory = max(stage.total_memory_bytes for stage in prediction.stages)
        table.add_row(name, degrees(layout), f"{prediction.step_s:.3f}",
                      f"{100 * (prediction.step_s / plan.prediction.step_s - 1):.1f} %",
                      f"{memory / 2**30:.1f}",
                      "" if layout is plan else what_changed(plan, layout))
    for entry in comparison.entries:
        if entry.layout is None:
            table.add_row(entry.recipe.name, f"none: {entry.problem[:120]}", "-", "-", "-", "")
    Console(width=130).print(table)
