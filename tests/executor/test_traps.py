"""Everything that trains on silently wrong gradients, or dies obscurely, in plain torch.

Each line of TRAPS names the parity cases (or faults) that would fail if it came back; the others
are checks of their own. What the documents cannot even say is refused when they are read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.layout import Layout
from profiler.documents import parse, to_data
from profiler.errors import InvalidInput
from tests.executor import fault_cases, parity_cases, tiny
from tests.executor.cases import Case
from tests.executor.launch import torchrun

TRAPS: dict[str, tuple[str, ...]] = {
    "FSDP resharding within a pipeline": ("llama pp x fsdp", "gpt2 pp x fsdp tied"),
    "replicas within a pipeline": ("gpt2 pp x replicate interleaved",),
    "means of micro-batches with unequal numbers of tokens": ("gpt2 fsdp", "gpt2 pp 1f1b",
                                                              "mean of means"),
    "statistics of one rank's batch": ("batchnet replicate", "batchnet hsdp", "batchnet pp gpipe"),
    "a tied table in a unit of its own": ("gpt2 fsdp", "gpt2 tp x fsdp each"),
    "a tied table on two stages": ("gpt2 pp 1f1b", "gpt2 pp interleaved tied", "gpt2 pp x tp tied",
                                   "untied embedding"),
    "tensor parallelism with replicas": ("gpt2 tp x replicate",),
    "Conv1D as a column matmul": ("gpt2 tp",),
    "learned positions under sequence parallelism": ("gpt2 tp", "bert tp"),
    "gradients of norms under sequence parallelism": ("llama tp", "skipped tensor-parallel sync"),
    "stages that pass several tensors": ("t5 pp", "skipnet pp4"),
    "frozen stages": ("mlp pp frozen stage",),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_has_its_cases(trap: str) -> None:
    every = {case.name for case in (*parity_cases.TWO, *parity_cases.FOUR, *parity_cases.EIGHT,
                                    *fault_cases.FAULTS)}
    assert set(TRAPS[trap]) <= every


@pytest.mark.parametrize("change, message", [
    ({"schedule": {"name": "zbv"}}, "schedule.name"),
    ({"schedule": {"name": "interleaved-zero-bubble"}}, "schedule.name"),
    ({"schedule": {"name": "dual-pipe-v"}}, "schedule.name")])
def test_schedules_that_are_wrong_with_fsdp_cannot_be_asked_for(
        graphs: Path, change: dict[str, Any], message: str) -> None:
    layout = Case(name="", model="gpt2", mesh={"pp": 2}).layout(tiny.graph("gpt2", graphs))
    with pytest.raises(InvalidInput, match=message):
        parse(Layout, to_data(layout) | change, "layout.json")
    assert parse(Layout, to_data(layout), "layout.json") == replace(layout)


@pytest.mark.processes
def test_the_others_are_right_or_refused(graphs: Path) -> None:
    """Dropout masks, tables that stay tied, shapes that change, plans, bf16: see traps_worker."""
    for name in ("llama", "gpt2"):
        tiny.graph(name, graphs)
    status, output = torchrun(2, "tests.executor.traps_worker", str(graphs), limit_s=240)
    assert status == 0, output[-6000:]
