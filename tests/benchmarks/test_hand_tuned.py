"""Hand-tuned layouts on paper: each is legal, fits, and is never faster than the plan."""

from __future__ import annotations

import pytest

from benchmarks.hand_tuned.paper import Comparison, as_data, compare, what_changed
from benchmarks.hand_tuned.recipes import Recipe, apply, load_recipes
from planner import inputs, topology_files
from planner.costing import Coster
from planner.legality import violations
from profiler.layer_graph import LayerGraph


def make_coster(model: str, topology: str, batch: int, seq_len: int) -> Coster:
    graph, _ = inputs.resolve_model(model)
    assert isinstance(graph, LayerGraph)
    request = inputs.make_request(graph, {"global_batch": batch, "seq_len": seq_len})
    return Coster(graph, topology_files.resolve(topology), request)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare("gpt2-xl", "l4x8:2", global_batch=64, seq_len=1024)


def test_no_recipe_is_faster_than_the_proven_plan(comparison: Comparison) -> None:
    plan = comparison.plan.prediction
    assert plan is not None
    ran = [entry.layout for entry in comparison.entries if entry.layout is not None]
    assert len(ran) >= 5
    for layout in ran:
        assert layout.prediction is not None
        assert layout.prediction.step_s >= plan.step_s * (1 - 1e-6)


def test_every_layout_is_legal_and_fits(comparison: Comparison) -> None:
    coster = make_coster("gpt2-xl", "l4x8:2", 64, 1024)
    for entry in comparison.entries:
        assert (entry.layout is None) == bool(entry.problem)
        if entry.layout is not None and entry.layout.prediction is not None:
            assert not violations(coster, entry.layout)
            assert all(stage.total_memory_bytes <= stage.capacity_bytes
                       for stage in entry.layout.prediction.stages)


def test_what_changed_names_the_largest_gap(comparison: Comparison) -> None:
    plan = comparison.plan.prediction
    assert plan is not None
    for entry in comparison.entries:
        if entry.layout is not None and entry.layout.prediction is not None:
            terms = entry.layout.prediction.step_terms_s
            gaps = {name: terms.get(name, 0.0) - plan.step_terms_s.get(name, 0.0)
                    for name in {*terms, *plan.step_terms_s}}
            largest = max(gaps, key=lambda name: abs(gaps[name]))
            if abs(gaps[largest]) > 0.01 * plan.step_s:
                said = what_changed(comparison.plan, entry.layout)
                assert said.startswith(largest.replace("_", " "))
    assert what_changed(comparison.plan, comparison.plan) == ""
    assert as_data(comparison)["recipes"][0]["name"] == "DDP"


@pytest.mark.parametrize(("name", "degrees", "micro_batch"), [
    ("DDP", {"dp_replicate": 16}, None), ("FSDP", {"dp_shard": 16}, None),
    ("HSDP", {"dp_shard": 8, "dp_replicate": 2}, None),
    ("Megatron's rule", {"tp": 8, "dp_replicate": 2}, 1),
    ("torchtitan 2-D", {"tp": 8, "dp_shard": 2}, None),
    ("pipeline only, 1F1B", {"pp": 16}, 1)])
def test_words_become_degrees(name: str, degrees: dict[str, int], micro_batch: int | None) -> None:
    recipe = next(recipe for recipe in load_recipes() if recipe.name == name)
    entry = apply(recipe, make_coster("gpt2-medium", "dgx-h100:2", 64, 1024), "gpt2-medium",
                  "dgx-h100:2")
    assert entry.layout is not None, entry.problem
    mesh = entry.layout.mesh
    found = {axis: mesh.degree(axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp")  # type: ignore[arg-type]
             if mesh.degree(axis) > 1}  # type: ignore[arg-type]
    assert found == degrees
    assert micro_batch in (None, entry.layout.micro_batch)


def test_a_recipe_that_cannot_be_says_why() -> None:
    coster = make_coster("llama3-70b", "l4x8", 8, 4096)
    entry = apply(Recipe(name="all", source="", dp_replicate="rest"), coster, "llama3-70b", "l4x8")
    assert entry.layout is None and "GiB too much" in entry.problem
    odd = apply(Recipe(name="odd", source="", tp=3, dp_shard="rest"), coster, "llama3-70b", "l4x8")
    assert odd.layout is None and odd.problem == "no degrees for these devices"
