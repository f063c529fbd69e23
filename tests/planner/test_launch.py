"""`plan launch`: the script is run here, with stand-ins for Slurm's commands and torchrun."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from planner.cli import run
from planner.layout import LayerRun, Layout, Mesh, Reference, Stage
from planner.request import Request
from profiler.documents import dump

MIXED = {"hosts": [{"preset": "dgx-h100", "nodes": 1}, {"preset": "dgx-a100-80g", "nodes": 2}]}


def layout(topology: str, **mesh: int | tuple[int, ...]) -> Layout:
    made = Mesh(**mesh)
    return Layout(model=Reference(name="gpt2"), topology=Reference(name=topology), mesh=made,
                  request=Request(global_batch=made.dp, seq_len=128), micro_batch=1,
                  num_micro_batches=1, stages=(Stage(runs=(LayerRun(
                      first_layer=0, num_layers=16),)),))


def script(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> str:
    status = run(["launch", str(path), *options])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out


def started(text: str, folder: Path, num_hosts: int) -> list[list[str]]:
    """Run a script under stand-ins: what torchrun was called with on each host."""
    place = folder / "bin"
    place.mkdir()
    for name, body in {
            "scontrol": "printf 'first\\nsecond\\n'",
            "srun": f'shift; for SLURM_NODEID in $(seq 0 {num_hosts - 1}); do '
                    'export SLURM_NODEID; "$@"; done',
            "torchrun": 'for word in "$@"; do printf "%s\\0" "$word"; done >> "$LOG"; '
                        'printf "\\n" >> "$LOG"'}.items():
        (place / name).write_text(f"#!/bin/bash\n{body}\n")
        (place / name).chmod(0o755)
    log = folder / "log"
    environment = os.environ | {"PATH": f"{place}:{os.environ['PATH']}", "LOG": str(log),
                                "SLURM_JOB_NODELIST": "nodes"}
    subprocess.run(["bash", "-c", text], env=environment, check=True)
    return [line.split("\0")[:-1] for line in log.read_text().splitlines()]


def test_each_host_gets_its_number_and_its_processes(capsys, tmp_path):
    path = tmp_path / "layout of mine.json"
    path.write_text(dump(layout("dgx-h100:2", dp_shard=12)))
    text = script(capsys, path, "--time", "12:00:00", "--partition", "gpu", "--",
                  "--steps", "7", "--save", "it's here")
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "#SBATCH --time=12:00:00\n" in text
    calls = started(text, tmp_path, 2)
    assert [call[:5] for call in calls] == [
        ["--nnodes=2", f"--node-rank={number}", f"--nproc-per-node={processes}",
         "--master-addr=first", "--master-port=29500"]
        for number, processes in ((0, 8), (1, 4))]
    assert {tuple(call[5:]) for call in calls} == {
        ("-m", "executor", "train", str(path), "--device", "cuda", "--steps", "7", "--save",
         "it's here")}


def test_hosts_follow_the_order_of_the_layout(capsys, tmp_path):
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump(MIXED))
    path = tmp_path / "layout.json"
    path.write_text(dump(layout(str(tmp_path / "mixed.yaml"), pp=1, dp_shard=18,
                                host_groups=(1, 0))))
    text = script(capsys, path)
    assert "2 hosts of 8 x a100-80g, 1 host of 2 x h100-sxm-80g" in text
    assert [call[2] for call in started(text, tmp_path, 3)] == [
        "--nproc-per-node=8", "--nproc-per-node=8", "--nproc-per-node=2"]


def test_one_host_of_processors(capsys, tmp_path):
    path = tmp_path / "layout.json"
    path.write_text(dump(layout("local:4", dp_shard=4)))
    text = script(capsys, path, "--topology", "cpu-host")
    assert "#SBATCH --cpus-per-task=4\n" in text
    assert f"torchrun --standalone --nproc-per-node=4 -m executor train {path} --device cpu" in text
    assert started(text, tmp_path, 1)[0][2] == "--nproc-per-node=4"


def test_the_script_goes_to_a_file(capsys, tmp_path):
    path, out = tmp_path / "layout.json", tmp_path / "job.sh"
    path.write_text(dump(layout("dgx-h100", dp_shard=8)))
    assert script(capsys, path, "-o", str(out)) == ""
    assert out.read_text() == script(capsys, path)


@pytest.mark.parametrize("change, options, message", [
    ({"mesh": Mesh(dp_shard=32)}, [], "needs 32 devices, dgx-h100 has 8"),
    ({"topology": Reference(name="dgx-h100", digest="sha256:0")}, [], "is not what it was"),
    ({"request": Request(global_batch=8, seq_len=128, target="megatron-lm")}, [],
     "planned for 'megatron-lm'"),
    ({"mesh": Mesh(dp_shard=8, host_groups=(1,))}, [], "host_groups [1] is not an order"),
    ({}, ["--job-name", "a b", "--time", "soon", "--partition", "x;y", "--port", "80"],
     "days-hours:minutes:seconds"),
    ({}, ["-o", "/absent/job.sh"], "there is no folder /absent"),
])
def test_what_cannot_be_launched_is_refused(capsys, tmp_path, change, options, message):
    path = tmp_path / "layout.json"
    path.write_text(dump(replace(layout("dgx-h100", dp_shard=8), **change)))
    assert run(["launch", str(path), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    if len(options) > 2:
        assert all(word in err for word in ("job name", "partition", "port 80"))


def test_a_layout_of_nonsense_is_refused(capsys, tmp_path):
    path = tmp_path / "layout.json"
    path.write_text(json.dumps({"meshwright": "Layout", "mesh": {"pp": "many"}}))
    assert run(["launch", str(path)]) == 2
    assert "mesh.pp" in capsys.readouterr().err
