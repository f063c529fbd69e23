"""The command line: training, checkpoints that other layouts resume, processes that die."""

# ruff: noqa: C408 (keyword arguments read better in tables)
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from planner.layout import Reference
from profiler.documents import digest, dump
from tests.executor import tiny
from tests.executor.cases import Case
from tests.executor.launch import ROOT, run_group

LAYOUTS = {
    "one": Case(name="", model="gpt2", num_micro_batches=4),
    "dp_tp": Case(name="", model="gpt2", mesh=dict(dp_shard=2, tp=2)),
    "pp_dp": Case(name="", model="gpt2", mesh=dict(pp=2, dp_shard=2)),
    "pp": Case(name="", model="gpt2", mesh=dict(pp=2), num_micro_batches=4),
}


@pytest.fixture(scope="module")
def folder(graphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("layouts")
    graph = tiny.graph("gpt2", graphs)
    (made / "graph.json").write_text(dump(graph))
    for name, case in LAYOUTS.items():
        layout = replace(case.layout(graph), model=Reference(name="gpt2", digest=digest(graph)))
        (made / f"{name}.json").write_text(dump(layout))
    return made


def _command(folder: Path, layout: str, processes: int, *options: str) -> list[str]:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *(start if processes > 1 else []), "-m", "executor", "train",
            str(folder / f"{layout}.json"), "--model", str(folder / "graph.json"),
            "--device", "cpu", "--lr", "3e-3", "--warmup", "3", *options]


def _losses(log: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in map(json.loads, log.read_text().splitlines())}


@pytest.mark.processes
def test_a_checkpoint_goes_on_under_other_layouts(folder, tmp_path):
    saved, log = str(tmp_path / "saved"), tmp_path / "log.jsonl"
    for layout, processes, steps in (("dp_tp", 4, 3), ("pp_dp", 4, 5), ("one", 1, 7)):
        status, output = run_group(
            _command(folder, layout, processes, "--steps", str(steps), "--save", saved,
                     "--metrics", str(log), *(["--resume"] if steps > 3 else []),
                     *(["--save-async", "--save-every", "1"] if layout == "dp_tp" else [])), 300)
        assert status == 0, output[-4000:]
    alone = tmp_path / "alone.jsonl"
    status, output = run_group(
        _command(folder, "one", 1, "--steps", "7", "--metrics", str(alone)), 300)
    assert status == 0, output[-4000:]
    assert "predicted" in output and "measured" in output
    resumed, whole = _losses(log), _losses(alone)
    assert resumed.keys() == whole.keys() == set(range(1, 8))
    assert max(abs(resumed[step] - whole[step]) for step in whole) < 1e-4
    assert whole[7] < whole[1]


def _workers(agent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == agent:
            found.append(int(stat.parent.name))
    return sorted(found)


@pytest.mark.processes
@pytest.mark.parametrize("moment", ["during a step", "during a save", "during a background save"])
def test_a_killed_rank_ends_the_others_and_loses_nothing_saved(folder, tmp_path, moment):
    saved, log = tmp_path / "saved", tmp_path / "log.jsonl"
    command = _command(folder, "pp", 2, "--steps", "1000", "--save", str(saved), "--save-every",
                       "1" if "save" in moment else "2", "--metrics", str(log),
                       *(["--save-async"] if "background" in moment else []))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    out = tmp_path / "output.txt"
    with out.open("w") as file:
        agent = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file,
                                 stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while len(list(saved.glob("step-*[0-9]"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        while "save" in moment and not list(saved.glob("*.partial")) \
                and time.monotonic() < deadline:
            time.sleep(0.0005)
        workers = _workers(agent.pid)
        assert len(workers) == 2, out.read_text()[-3000:]
        os.kill(workers[1], signal.SIGKILL)
        assert agent.wait(timeout=120) != 0
        assert [pid for pid in workers if Path(f"/proc/{pid}/stat").exists()] == []
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
    last = max(int(child.name[5:]) for child in saved.iterdir()
               if not child.name.endswith(".partial"))
    status, output = run_group(_command(folder, "one", 1, "--steps", str(last + 1), "--save",
                                        str(saved), "--resume"), 300)
    assert status == 0, output[-4000:]
    assert f"step {last + 1:>6}" in output
    assert f"step {last:>6}" not in output
