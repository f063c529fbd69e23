"""Whatever a user does wrong on `executor train` ends in one clear message and status 2."""

# ruff: noqa: C408 (keyword arguments read better in tables)
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.__main__ import main
from executor.data import make_source
from planner import topology_files
from planner.layout import Layout, Reference
from planner.pricing import price
from profiler.documents import digest, dump, load
from profiler.layer_graph import LayerGraph
from tests.executor import tiny
from tests.executor.cases import Case


@pytest.fixture
def place(graphs: Path, tmp_path: Path) -> Path:
    """graph.json, and one.json: a layout of one device for it."""
    graph = tiny.graph("gpt2", graphs)
    (tmp_path / "graph.json").write_text(dump(graph))
    for name, case in {"one": Case(name="", model="gpt2", num_micro_batches=4),
                       "two": Case(name="", model="gpt2", mesh=dict(pp=2))}.items():
        layout = replace(case.layout(graph), model=Reference(name="gpt2", digest=digest(graph)))
        (tmp_path / f"{name}.json").write_text(dump(layout))
    return tmp_path


def refused(capsys: Any, place: Path, layout: str, *options: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["train", str(place / f"{layout}.json"), "--model", str(place / "graph.json"),
              "--steps", "1", *options])
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert "Traceback" not in err
    return err


def edited(place: Path, **fields: Any) -> str:
    data = json.loads((place / "one.json").read_text()) | fields
    (place / "edited.json").write_text(json.dumps(data))
    return "edited"


@pytest.mark.parametrize("options, message", [
    (["--device", "cuda"], "needs CUDA device 0, and torch sees 0 here"),
    (["--resume"], "need --save"),
    (["--save-async"], "need --save"),
    (["--save", "/proc/nowhere"], "--save /proc/nowhere: cannot be written"),
    (["--metrics", "/absent/log"], "/absent/log: cannot be written: No such file"),
    (["--data", "absent.bin"], "absent.bin: cannot be read as uint16"),
    (["--data", "absent.module:batch"], "'absent.module:batch': cannot be imported"),
    (["--data", "json:__name__"], "is str, not a function"),
    (["--lr", "0"], "Invalid value for '--lr'"),
    (["--lr-schedule", "steps"], "is not one of"),
])
def test_options(place, capsys, monkeypatch, options, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert message in refused(capsys, place, "one", *options)


def test_layouts(place, capsys):
    assert "needs 2 processes, 1 are running" in refused(capsys, place, "two")
    assert "global_batch 4 must equal" in refused(
        capsys, place, edited(place, num_micro_batches=3))
    assert "with digest sha256:0..." in refused(
        capsys, place, edited(place, model={"name": "gpt2", "digest": "sha256:0"}))
    assert "mesh.pp" in refused(capsys, place, edited(place, mesh={"pp": "many"}))
    assert "cannot be read" in refused(capsys, place, "absent")
    stages = [{"runs": [{"first_layer": 0, "num_layers": 2}]}]
    assert "missing: [2, 3" in refused(capsys, place, edited(place, stages=stages))


def test_less_memory_than_predicted(place, capsys, monkeypatch):
    layout = load(Layout, place / "one.json")
    graph = load(LayerGraph, place / "graph.json")
    priced = price(graph, topology_files.resolve("cpu-host"), layout)
    (place / "priced.json").write_text(dump(priced))
    monkeypatch.setattr("executor.mesh.memory_bytes", lambda device: 2**20)
    said = refused(capsys, place, "priced")
    assert "pipeline rank 0 is predicted to need" in said
    assert "rank 0 has 0.00 GiB (cpu): plan again" in said


def test_data(place, capsys, graphs):
    short = place / "tokens.bin"
    short.write_bytes(b"\0" * 8)
    assert "holds 4 tokens, one sample needs 17" in refused(
        capsys, place, "one", "--data", str(short))
    short.write_bytes(b"\xff" * 200)
    config = type("Config", (), {"vocab_size": tiny.VOCABULARY})
    source = make_source(tiny.graph("gpt2", graphs), 16, str(short), None, config)
    with pytest.raises(Exception, match="holds token 65535, the model's vocabulary ends at 1020"):
        source.batch(0, 2)
    tokens = torch.arange(100, dtype=torch.int32).to(torch.uint16).numpy()
    short.write_bytes(tokens.tobytes())
    inputs, targets = make_source(tiny.graph("gpt2", graphs), 16, str(short), None,
                                  config).batch(1, 1)
    assert inputs["input_ids"].tolist() == [list(range(16, 32))]
    assert targets.tolist() == [list(range(17, 33))]


def test_a_model_of_other_inputs_needs_a_function(graphs):
    graph = tiny.graph("mlp", graphs)
    with pytest.raises(Exception, match=r"give --data package\.module:function"):
        make_source(graph, 1, None, None, None)
    source = make_source(graph, 1, f"{__name__}:halves", None, None)
    assert source.batch(3, 2)[1].tolist() == [1.5, 2.0]
    with pytest.raises(Exception, match=r"must return \(inputs, targets\)"):
        make_source(graph, 1, "math:gcd", None, None).batch(2, 4)


def halves(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(first, first + count)
    return numbers, numbers / 2
