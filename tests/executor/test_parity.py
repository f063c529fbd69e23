"""Every kind of layout computes what one process computes; test_verify finds runs that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from profiler.building import build_subject
from profiler.capture import capture
from profiler.local_parameters import local_tensor
from profiler.shards import Emulation, divided, local_arguments
from tests.executor import parity_cases, tiny
from tests.executor.launch import torchrun
from tests.executor.parity_worker import WATCHED_BLOCK, WATCHED_CASE

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
    if WATCHED_CASE in results:
        assert results[WATCHED_CASE]["seen"] == _measured_shard(all_graphs)


def _measured_shard(graphs: Path) -> dict[str, object]:
    """What the profiler measures as rank 0's share of that block: 2 KV heads over 4 ranks."""
    graph = tiny.graph("llama", graphs)
    subject = build_subject(graph, torch.device("cpu"), torch.float32)
    call = next(c for c in capture(subject, 1, tiny.LENGTH).distinct
                if graph.layers[c.layer].name == WATCHED_BLOCK)
    group = Emulation(4, tiny.LENGTH)
    shard = divided(call.module, graph.kind_of(call.layer), group, subject.device)
    results: dict[str, list[int]] = {}
    for name, inner in shard.named_modules():
        if name:
            inner.register_forward_hook(lambda module, args, out, name=name: results.update(
                {name: list((out[0] if isinstance(out, tuple) else out).shape)}))
    args, kwargs = local_arguments(*call.fresh_arguments(), group)
    shard(*args, **kwargs)
    return {"parameters": {n: list(local_tensor(p).shape) for n, p in shard.named_parameters()},
            "results": results}
