"""What the planner answers to random requests runs, and computes what one process computes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from executor.compare import GRADIENT_LIMIT
from planner.capabilities import load_capabilities
from planner.layout import Layout
from profiler.documents import load
from profiler.layer_graph import LayerGraph
from tests.executor import parity_cases, tiny
from tests.executor.launch import torchrun

pytestmark = pytest.mark.processes

NUMBERS = [number for number in range(44) if number not in {29, 30, 39, 41}]  # one device: dull


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, graphs: Path) -> Path:
    """A folder with the graph and the layout of every request, and what each process found."""
    folder = tmp_path_factory.mktemp("answers")
    for name in {case.model for case in parity_cases.EIGHT}:
        tiny.graph(name, graphs)
    status, output = torchrun(8, "tests.executor.requests_worker", str(folder), str(graphs),
                              ",".join(map(str, NUMBERS)), "parity", limit_s=900)
    assert status == 0, output[-8000:]
    return folder


def _layouts(folder: Path) -> list[tuple[LayerGraph, Layout]]:
    return [(load(LayerGraph, folder / f"{n}.graph"), load(Layout, folder / f"{n}.layout"))
            for n in NUMBERS]


def test_planned_layouts_equal_one_process(answers: Path) -> None:
    found = {}
    for path in answers.glob("found-*.json"):
        found |= json.loads(path.read_text())
    assert len(NUMBERS) >= 40
    errors = {number: found[str(number)] for number in NUMBERS}
    assert {n: error for n, error in errors.items() if not error <= GRADIENT_LIMIT} == {}


def test_eight_processes_equal_one(answers: Path) -> None:
    for path in answers.glob("found-*.json"):
        results = json.loads(path.read_text())
        names = [case.name for case in parity_cases.EIGHT]
        assert {name: results[name] for name in names if not results[name]["passed"]} == {}


def test_requests_are_of_every_kind(answers: Path) -> None:
    seen: Counter[str] = Counter()
    for graph, layout in _layouts(answers):
        mesh = layout.mesh
        chosen = {choice for stage in layout.stages for _, choice in stage.iter_layers()}
        axes = [axis for axis in ("pp", "dp_replicate", "dp_shard", "tp") if mesh.degree(axis) > 1]
        seen.update(axes)
        seen["mixed"] += len(axes) > 1
        seen.update({choice.recompute for choice in chosen})
        seen.update([layout.schedule.name, f"{mesh.num_devices} devices"])
        seen["some resharded"] += len({choice.reshard for choice in chosen}) > 1
        seen["some whole"] += mesh.tp > 1 and any(not c.tensor_parallel for c in chosen)
        seen["tied"] += bool(graph.ties)
        seen["kv heads on several ranks"] += any(
            kind.tensor_parallel and kind.tensor_parallel.kv_parameters
            and kind.tensor_parallel.divides["kv_heads"] < mesh.tp
            for kind in graph.kinds.values())
    for name in ("pp", "dp_replicate", "dp_shard", "tp", "mixed", "full", "1f1b", "gpipe",
                 "8 devices", "4 devices", "some resharded", "some whole", "tied",
                 "kv heads on several ranks"):
        assert seen[name] >= 1, (name, seen)


def test_every_class_that_can_be_divided_is_divided_somewhere(answers: Path, all_graphs: Path
                                                              ) -> None:
    divided: set[str] = set()  # GPT-NeoX, Mixtral, Phi, StarCoder2, Granite, OLMo by parity cases

    def note(graph: LayerGraph, layout: Layout) -> None:
        if layout.mesh.tp > 1:
            divided.update(name for stage in layout.stages for layer, choice in stage.iter_layers()
                           if choice.tensor_parallel and (split := graph.kind_of(
                               layer).tensor_parallel) for name in split.callers)
    for graph, layout in _layouts(answers):
        note(graph, layout)
    for case in (*parity_cases.TWO, *parity_cases.FOUR, *parity_cases.EIGHT):
        graph = tiny.graph(case.model, all_graphs)
        note(graph, case.layout(graph))
    known = set(load_capabilities("executor").tensor_parallel_classes or ())
    assert known - divided == set()
