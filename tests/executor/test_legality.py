"""What a layout may not ask for is refused with one clear message, before anything starts."""

# ruff: noqa: C408 (keyword arguments read better in tables)
from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from executor.legality import check_layout, check_model
from executor.losses import cross_entropy
from executor.parallelize import parallelize
from planner.layout import Mesh, Reference, Schedule, Stage
from profiler.errors import InvalidInput, UnsupportedLayout
from profiler.trace import trace
from tests.executor import tiny
from tests.executor.cases import FULL, Case
from tests.executor.launch import ROOT

BASE = Case(name="base", model="gpt2", mesh=dict(pp=2, tp=2), num_micro_batches=2)


@pytest.fixture(scope="module")
def gpt2(graphs: Path):
    return tiny.graph("gpt2", graphs)


def _problems(layout, graph) -> str:
    with pytest.raises(UnsupportedLayout) as caught:
        check_layout(layout, graph)
    return str(caught.value)


def test_the_base_is_legal(gpt2):
    check_layout(BASE.layout(gpt2), gpt2)


@pytest.mark.parametrize("change, words", [
    (dict(num_micro_batches=1), ["global_batch 2", "= 1", "num_micro_batches >= pp = 2"]),
    (dict(mesh=Mesh(pp=2, tp=3)), ["heads 4 is not divisible by 3", "legal degrees: 1, 2, 4"]),
    (dict(mesh=Mesh(pp=4, tp=2)), ["2 stages", "pp x chunks = 4 x 1"]),
    (dict(mesh=Mesh(pp=2, cp=2, order=("pp", "cp"))), ["cp is 2"]),
    (dict(schedule=Schedule(chunks=2)), ["chunks 2 > 1 needs schedule interleaved"]),
    (dict(schedule=Schedule(name="interleaved")), ["needs chunks > 1"]),
    (dict(schedule=Schedule(gradient_sync="each_micro_batch")), ["needs pp = 1"]),
])
def test_illegal_layouts_name_values_and_what_is_legal(gpt2, change, words):
    message = _problems(replace(BASE.layout(gpt2), **change), gpt2)
    for word in words:
        assert word in message


def test_stages_must_hold_each_layer_once(gpt2):
    layout = BASE.layout(gpt2)
    first, second = layout.stages
    message = _problems(replace(layout, stages=(first, Stage(runs=(*second.runs, second.runs[0])))),
                        gpt2)
    assert "twice: [4]" in message
    short = Stage(runs=second.runs[:-1])
    assert "missing: [6]" in _problems(replace(layout, stages=(first, short)), gpt2)


def test_fp16_and_sequence_length_and_ties(gpt2):
    layout = BASE.layout(gpt2)
    assert "loss scaling" in _problems(
        replace(layout, request=replace(layout.request, precision="fp16-mixed")), gpt2)
    assert "must divide seq_len 15" in _problems(
        replace(layout, request=replace(layout.request, seq_len=15)), gpt2)
    tied = Case(name="tied", model="gpt2", mesh=dict(tp=2), whole=(0,)).layout(gpt2)
    assert "share a parameter" in _problems(tied, gpt2)


def test_another_model_is_refused(gpt2):
    layout = replace(BASE.layout(gpt2), model=Reference(name="gpt2", digest="sha256:" + "0" * 64))
    with pytest.raises(InvalidInput, match="plan again"):
        check_model(layout, gpt2)


def test_a_world_of_another_size_is_refused(gpt2):
    made = tiny.build("gpt2", 2, torch.float32)
    with pytest.raises(InvalidInput, match=r"needs 4 processes .*pp 2.* 1 are running"):
        parallelize(made.model, BASE.layout(gpt2), loss=made.loss, graph=gpt2, device_type="cpu")


def test_a_bare_function_is_no_loss(gpt2):
    made = tiny.build("gpt2", 2, torch.float32)
    with pytest.raises(InvalidInput, match="mean of means"):
        parallelize(made.model, BASE.layout(gpt2), loss=nn.functional.cross_entropy, graph=gpt2)


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.outlet = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.norm(self.inlet(x)))


class WithOutsider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(8, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.scale * self.inlet(x))


def _refused(model: nn.Module, case: Case) -> str:
    graph = trace(model, torch.zeros(4, 8), name="model")
    with pytest.raises(UnsupportedLayout) as caught:
        parallelize(model, case.layout(graph), loss=cross_entropy(), graph=graph,
                    device_type="cpu")
    return str(caught.value)


def test_batch_statistics_are_refused_where_they_would_differ():
    for case in (Case(name="", model="", mesh=dict(dp_shard=2)),
                 Case(name="", model="", num_micro_batches=2),
                 Case(name="", model="", num_micro_batches=1, choices=(FULL,))):
        assert "batch normalization (norm)" in _refused(WithStatistics(), case)


def test_parameters_outside_layers_are_refused_in_a_pipeline():
    assert "outside every layer (scale)" in _refused(
        WithOutsider(), Case(name="", model="", mesh=dict(pp=2)))


def test_importing_the_executor_is_free_of_torch():
    code = "import sys, executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
