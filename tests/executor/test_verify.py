"""`executor verify`: a table that says what was compared, and a loud failure where one is due."""

# ruff: noqa: C408 (keyword arguments read better in tables)
from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from executor.compare import Comparison
from executor.verify import print_table, verify
from planner.layout import Reference
from planner.models import resolve
from profiler.documents import dump
from profiler.errors import InvalidInput
from profiler.layer_graph import ModelSource
from tests.executor import fault_cases, tiny
from tests.executor.cases import Case
from tests.executor.launch import ROOT, run_group, torchrun
from tests.executor.verify_worker import FAULT

WORKER = "tests.executor.verify_worker"


def written(folder: Path, case: Case, graph, name: str) -> str:
    path = folder / "layout.json"
    path.write_text(dump(replace(case.layout(graph), model=Reference(name=name))))
    return str(path)


@pytest.mark.processes
def test_the_layout_of_the_readme_is_verified(tmp_path):
    text = (ROOT / "README.md").read_text().split("```json\n", 1)[1].split("```", 1)[0]
    (tmp_path / "mine.json").write_text(text)
    status, output = run_group([sys.executable, "-m", "executor", "verify",
                                str(tmp_path / "mine.json")], 180)
    assert status == 0, output[-3000:]
    assert "llama3-8b: 35 layers, 8 processes (dp_shard 4, tp 2)" in output
    assert "verified on: 7 layers of width 64, 4 processes (dp_shard 2, tp 2)" in output
    assert output.count("  ok\n") == 4
    assert "The layout computes what the model alone computes." in output


@pytest.mark.processes
def test_a_function_is_verified_as_it_is_and_a_fault_is_found(tmp_path, monkeypatch, capsys):
    name = "tests.executor.plain:mlp"
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    graph = resolve(name)
    path = written(tmp_path, Case(name="", model="mlp", mesh=dict(dp_shard=4)), graph, name)
    monkeypatch.setenv(FAULT, "wrong loss scale")
    assert verify(path, None, 2, 120, worker=WORKER) is False
    out = capsys.readouterr().out
    assert "layers as they are, 2 processes (dp_shard 2)" in out
    assert "WRONG" in out
    assert "does NOT compute what the model alone computes (worst: " in out


@pytest.mark.processes
def test_every_fault_is_found_loudly(graphs, capsys):
    tiny.graph("gpt2", graphs)
    status, output = torchrun(2, WORKER, str(graphs), "FAULTS")
    assert status == 0, output[-4000:]
    found = json.loads((graphs / "found.json").read_text())
    assert found.keys() == {case.name for case in fault_cases.FAULTS}
    for name, values in found.items():
        print_table(Comparison(**values))
        out = capsys.readouterr().out
        assert "WRONG" in out, name
        assert "does NOT" in out, name


def test_what_cannot_be_verified_is_said(tmp_path, graphs):
    graph = replace(tiny.graph("mlp", graphs), source=ModelSource())
    (tmp_path / "graph.json").write_text(dump(graph))
    path = written(tmp_path, Case(name="", model="mlp"), graph, str(tmp_path / "graph.json"))
    with pytest.raises(InvalidInput, match="does not say what it was traced from"):
        verify(path, None, 2, 60)
    wide = replace(graph, source=ModelSource(python_function="a:b"))
    (tmp_path / "graph.json").write_text(dump(wide))
    import executor.verify

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor.verify, "MAX_BYTES", 1000)
        with pytest.raises(InvalidInput, match="as it is, in float64: its parameters are"):
            verify(path, None, 2, 60)
