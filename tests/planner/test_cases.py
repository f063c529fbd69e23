"""The table of cases that people met, and that each is tested or has a reason why it is not.

`cases/cases.json` holds what was asked, what was observed, the right answer and the thread that it
is from; `cases/test_*.py` hold a test named after each case that the space can express.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from profiler.layer_graph import LayerGraph
from tests.planner.cases import test_legal, test_memory, test_pipeline, test_throughput
from tests.planner.cases.graphs import decoder, with_num_blocks
from tests.planner.cases.layouts import model

CASES = json.loads((Path(__file__).parent / "cases" / "cases.json").read_text())
NOT_EXPRESSIBLE = {case["id"]: case["not_expressible"]
                   for case in CASES if "not_expressible" in case}
MODULES = (test_legal, test_memory, test_pipeline, test_throughput)


def named_in_tests() -> set[str]:
    """Cases that a test is named after."""
    names = [name for module in MODULES for name in vars(module)]
    return {f"C{match[1]}" for name in names if (match := re.match(r"test_c(\d+)_", name))}


def test_each_case_is_tested_or_has_a_reason() -> None:
    known = [case["id"] for case in CASES]
    assert len(set(known)) == len(known)
    assert named_in_tests() | NOT_EXPRESSIBLE.keys() == set(known)
    assert not named_in_tests() & NOT_EXPRESSIBLE.keys()


def test_each_case_names_its_source_and_answer() -> None:
    for case in CASES:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+| benchmarks/\w+)", case["source"]), case["id"]
        assert case["right_answer"]
        assert len(case.get("not_expressible", "a reason")) >= 8


# --- the models that the tests write down themselves

def saved_bytes(graph: LayerGraph) -> int:
    return sum(group.bytes_at(1, 4096, 2) for i in range(len(graph.layers))
               for group in graph.kind_of(i).saved)


def test_builder_agrees_with_the_catalogue() -> None:
    """Parameters to the norm before the head, FLOPs exactly, saved activations to 1 %."""
    built = decoder("llama2-7b", num_layers=32, hidden=4096, ffn=11008, heads=32, vocabulary=32000)
    traced = model("llama2-7b")
    assert built.num_parameters == traced.num_parameters - 4096
    for count in (LayerGraph.forward_flops, LayerGraph.backward_flops):
        assert count(built, 2, 4096) == count(traced, 2, 4096)
    assert saved_bytes(built) == pytest.approx(saved_bytes(traced), rel=0.01)


def test_with_num_blocks_is_a_model_of_that_depth() -> None:
    whole = model("gpt2-medium")
    assert with_num_blocks(whole, 24, whole.name).edges == whole.edges
    half = with_num_blocks(whole, 12, "half")
    block = whole.kinds[whole.layers[5].kind].num_parameters
    assert half.num_parameters == whole.num_parameters - 12 * block
    assert [(tie.places[0][0], tie.places[1][0]) for tie in half.ties] == [(0, 15)]
