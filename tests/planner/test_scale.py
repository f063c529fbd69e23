"""Scaling: the shares of linear worked by hand, and what the command says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner import inputs
from planner.cli import commands, run
from planner.report.scale import as_data, write_plot
from planner.scale import ScalePoint, device_seconds, scale, topologies
from profiler.errors import InvalidInput

FIELDS: dict[str, Any] = {"global_batch": 64, "seq_len": 1024}


@pytest.fixture(scope="module")
def points() -> list[ScalePoint]:
    graph, name = inputs.resolve_model("gpt2-xl")
    return scale(graph, name, "l4x8", (32, 8, 8), FIELDS)


def test_points_are_in_order_and_each_is_proven(points: list[ScalePoint]) -> None:
    assert [point.num_devices for point in points] == [8, 32]
    for point in points:
        assert point.layout is not None and point.layout.proof is not None
        assert point.layout.proof.status == "OPTIMAL"
        assert point.layout.mesh.num_devices <= point.num_devices


def test_linear_is_samples_per_second_per_device_against_the_first(
        points: list[ScalePoint]) -> None:
    rates = [p.layout.prediction.samples_per_s / p.num_devices  # type: ignore[union-attr]
             for p in points]
    assert points[0].linear == 1.0 and points[0].limiting is None
    assert points[1].linear == pytest.approx(rates[1] / rates[0])


def test_the_limiting_term_grew_most(points: list[ScalePoint]) -> None:
    before, now = device_seconds(points[0]), device_seconds(points[1])
    growth = {name: now[name] - before.get(name, 0.0) for name in now}
    assert points[1].linear is not None and points[1].linear < 1
    assert points[1].limiting == max(growth, key=lambda name: growth[name])
    assert points[1].limiting_share == pytest.approx(
        max(growth.values()) / sum(before.values()))


def test_what_does_not_fit_is_a_row_of_its_own() -> None:
    graph, name = inputs.resolve_model("llama2-13b")
    first, second = scale(graph, name, "l4x8", (8, 32), {"seq_len": 2048},
                          samples_per_device=1)
    assert first.layout is None and "does not fit" in first.problem
    assert second.layout is not None and second.linear == 1.0
    assert (first.global_batch, second.global_batch) == (8, 32)
    assert as_data([first])[0]["layout"] is None


@pytest.mark.parametrize(("preset", "devices", "says"), [
    ("dgx-h100:2", (8,), "a preset alone"), ("nothing", (8,), "a preset alone"),
    ("dgx-h100", (8, 12), "12 is not a multiple of 8"), ("dgx-h100", (0,), "not a multiple")])
def test_topologies_that_cannot_be_scaled(preset: str, devices: tuple[int, ...], says: str
                                          ) -> None:
    with pytest.raises(InvalidInput, match=says):
        topologies(preset, devices)


@pytest.mark.parametrize(("options", "says"), [
    ((), "give either"), (("--global-batch", "8", "--samples-per-device", "1"), "give either"),
    (("--samples-per-device", "0.3"), "no whole number"),
    (("--global-batch", "8", "--devices", "8,x"), "joined by commas"),
    (("--global-batch", "8", "--plot", "plot.txt"), ".png, .svg, .pdf")])
def test_wrong_use_is_one_message(options: tuple[str, ...], says: str,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["scale", "gpt2", "-t", "l4x8", "--devices", "8", "--seq-len", "128"]
    assert run([*arguments, *options]) == 2
    assert says in capsys.readouterr().err


def test_command_prints_a_table_and_draws_a_plot(tmp_path: Path) -> None:
    arguments = ["scale", "gpt2", "-t", "l4x8", "-n", "8,16", "--global-batch", "32",
                 "--seq-len", "512"]
    plot = tmp_path / "plot.svg"
    result = CliRunner().invoke(commands, [*arguments, "--plot", str(plot)], standalone_mode=False)
    assert result.exception is None
    assert "100.0 %" in result.output and "limiting term" in result.output
    assert plot.read_text().startswith("<?xml")
    data = json.loads(CliRunner().invoke(commands, [*arguments, "--json"],
                                         standalone_mode=False).output)
    assert [point["num_devices"] for point in data] == [8, 16]


def test_nothing_to_draw(tmp_path: Path) -> None:
    nothing = ScalePoint(num_devices=8, global_batch=8, layout=None, problem="does not fit")
    with pytest.raises(InvalidInput, match="nothing to draw"):
        write_plot(tmp_path / "plot.png", [nothing], "gpt2", "l4x8")
