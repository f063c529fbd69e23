"""Every kind of layout computes what one process computes; test_verify finds runs that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.executor import parity_cases
from tests.executor.launch import torchrun

pytestmark = pytest.mark.processes


def _run(tmp_path: Path, graphs: Path, processes: int, module: str, cases: str, limit_s: float):
    out = tmp_path / "results.json"
    status, output = torchrun(processes, "tests.executor.parity_worker", module, cases,
                              str(graphs), str(out), limit_s=limit_s)
    assert status == 0, output[-6000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("processes, cases, limit_s", [(2, "TWO", 600), (4, "FOUR", 600)])
def test_gradients_and_losses_equal_one_process(tmp_path, all_graphs, processes, cases, limit_s):
    results = _run(tmp_path, all_graphs, processes, "tests.executor.parity_cases", cases, limit_s)
    assert results.keys() == {case.name for case in getattr(parity_cases, cases)}
    assert {name: r for name, r in results.items() if not r["passed"]} == {}
