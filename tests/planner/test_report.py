"""The printed report: what it says, that it fits the width, and that names stay harmless."""

from __future__ import annotations

import os
import pty
import select
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from planner import models, topology_files
from planner.layout import (
    Alternative,
    Choice,
    LayerRun,
    Layout,
    Mesh,
    Prediction,
    Proof,
    Reference,
    Schedule,
    Stage,
    StagePrediction,
)
from planner.report import WIDTH, catalogue, print_check, print_plan
from planner.report.live import describe, progress_line
from planner.report.verdict import overflows
from planner.report.words import LayerNames, gib, ranges, scaled, seconds
from planner.request import Request
from profiler.layer_graph import Layer, LayerGraph, LayerKind

GIB = 2**30
PROOF = Proof(status="OPTIMAL", bound_s=2.0, gap=0.0, space_size=12 * 10**30, candidates=40,
              bounded=30, solved=10, resolution=1e-6, solver="CP-SAT")


def make_layout(model: str = "llama3-8b", topology: str = "dgx-h100:2", *, pp: int = 1,
                chunks: int = 1, dp_shard: int = 1, tp: int = 1, used_gib: float = 60.0,
                recompute: str = "none") -> Layout:
    """A layout with an invented prediction: layers in even stages."""
    graph = models.resolve(model)
    parts = pp * chunks
    cuts = [len(graph.layers) * i // parts for i in range(parts + 1)]
    choice = Choice(recompute=recompute)
    stages = tuple(Stage(runs=(LayerRun(first_layer=a, num_layers=b - a, choice=choice),))
                   for a, b in pairwise(cuts))
    mesh = Mesh(pp=pp, dp_shard=dp_shard, tp=tp)
    predicted = tuple(StagePrediction(
        pipeline_rank=r, device="h100-sxm-80g",
        micro_batch_s={"forward_compute": 0.03},
        tail_s={}, capacity_bytes=70 * GIB, in_flight=pp - r,
        memory_bytes={"parameters": 10 * GIB, "activations": int((used_gib - 10) * GIB) - r * GIB})
        for r in range(pp))
    prediction = Prediction(
        step_s=2.0, step_terms_s={"forward_compute": 0.5, "backward_compute": 1.5}, replay_s=2.02,
        samples_per_s=128.0, tokens_per_s_per_device=65_536.0, mfu=0.4321, stages=predicted,
        sources={"compute": "analytic"})
    return Layout(
        model=Reference(name=model), topology=Reference(name=topology),
        request=Request(global_batch=256, seq_len=8192), mesh=mesh, micro_batch=1,
        num_micro_batches=256 // mesh.dp, schedule=Schedule(
            name="interleaved" if chunks > 1 else "1f1b", chunks=chunks),
        stages=stages, prediction=prediction, proof=PROOF, notes=("a note of the planner",),
        alternatives=(Alternative(description="tp 4", step_s=2.2, slower_by=0.1,
                                  why="tensor_parallel_collectives"),))


def printed(layout: Layout, capsys: pytest.CaptureFixture[str]) -> str:
    graph = models.resolve(layout.model.name)
    print_plan(layout, graph, topology_files.resolve(layout.topology.name), wall_s=1.5)
    return capsys.readouterr().out


def test_report_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(make_layout(pp=2, dp_shard=1, tp=8), capsys)
    for part in ("llama3-8b on dgx-h100:2: 2.000 s a step", "8,030,261,248 parameters",
                 "16 of 16 devices", "pp 2: layers in stages; spans 2 hosts",
                 "tp 8: layers divided, sequences between them; inside a host", "1f1b",
                 "256 samples a step of 8,192 tokens", "bf16-mixed", "adamw",
                 "1 sample on one data-parallel rank, 256 a step",
                 "embed_tokens, layers 0-15", "layers 16-31, norm, lm_head",
                 "stage 0", "stage 1", "activations", "50.00", "usable (8% left free)", "to spare",
                 "backward compute", "75.0 %", "replayed event by event", "+1.0 %",
                 "128.00", "65,536", "43.2 % of the dense bfloat16 peak, 989 TFLOP/s",
                 "recompute is not", "OPTIMAL", "0, to a resolution of 1e-06", "1.2 x 10^31",
                 "40 candidates", "30 bounded", "10 solved", "CP-SAT", "seconds 1.50",
                 "tensor parallel collectives", "10.0 %", "a note of the planner"):
        assert part in " ".join(text.split()), part


def test_idle_devices_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "8 of 16 devices (8 idle)" in printed(make_layout(dp_shard=8), capsys)


@pytest.mark.parametrize("sizes", [{"pp": 1, "dp_shard": 16}, {"pp": 16}, {"pp": 4, "tp": 4},
                                   {"pp": 4, "chunks": 4, "dp_shard": 2, "tp": 2}])
def test_fits_the_width_without_trailing_blanks(sizes: dict[str, int],
                                                capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(make_layout(**sizes), capsys).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert all(line == line.rstrip() for line in lines)
    assert "\x1b" not in "".join(lines)


def test_few_stages_are_rows_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(make_layout(pp=16), capsys)
    table = text[text.index("Stages"):text.index("Memory")]
    assert sum(line.lstrip()[:1].isdigit() for line in table.splitlines()) == 16


def test_many_equal_stages_are_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    layout = make_layout("llama3.1-405b", "dgx-h100:4", pp=32)
    text = printed(layout, capsys)
    table = text[text.index("Stages"):text.index("Memory")]
    rows = [line for line in table.splitlines() if line.lstrip()[:1].isdigit()]
    assert len(rows) < 16
    assert "(4 each)" in table
    assert "stage 31" in text  # the last stage's memory is shown though not every one's is
    assert "stage 15" not in text


def test_interleaved_rank_lists_all_of_its_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(make_layout(pp=4, chunks=2), capsys)
    assert "embed_tokens, layers 0-2, 16-19" in text
    assert "2 chunks of layers on each pipeline rank" in text


def test_layers_of_unlike_choice_are_rows_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    layout = make_layout()
    runs = (LayerRun(first_layer=0, num_layers=5, choice=Choice(recompute="full")),
            LayerRun(first_layer=5, num_layers=30))
    text = " ".join(printed(replace(layout, stages=(Stage(runs=runs),)), capsys).split())
    assert "embed_tokens, layers 0-3 0 full" in text
    assert "layers 4-31, norm, lm_head none" in text


def test_names_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    graph = models.resolve("gpt2")
    layers = (replace(graph.layers[0], name="\x1b[2Jevil[bold]"), *graph.layers[1:])
    layout = replace(make_layout("gpt2"), notes=("\x1b]0;title\x07[red]x[/red]",))
    print_check(layout, replace(graph, layers=layers), topology_files.resolve("dgx-h100"))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]x[/red]" in text
    assert "evil[bold]" in text


def test_check_says_that_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    layout = make_layout()
    graph, topology = models.resolve("llama3-8b"), topology_files.resolve("dgx-h100:2")
    print_check(replace(layout, proof=None), graph, topology)
    text = capsys.readouterr().out
    assert "Legal, and it fits" in text
    assert "priced, not searched" in text


def test_overflow_names_stage_amount_and_largest_terms(capsys: pytest.CaptureFixture[str]) -> None:
    layout = make_layout(pp=2, used_gib=75.0)
    lines = overflows(layout)
    assert lines[0].startswith("stage 0 on h100-sxm-80g needs 75.00 GiB of 70.00 usable: 5.00 GiB")
    assert "activations 65.00, parameters 10.00" in lines[0]
    assert len(lines) == 2
    assert "Does not fit" in printed(layout, capsys)
    assert overflows(make_layout(used_gib=70.0)) == []


def test_worst_stages_come_first_and_the_rest_are_counted() -> None:
    lines = overflows(make_layout(pp=16, used_gib=100.0))
    assert len(lines) == 5
    assert lines[0].startswith("stage 0 ")
    assert lines[-1] == "and 12 more stages"


@pytest.mark.parametrize(("names", "text"), [
    (["model.embed", "model.layers.0", "model.layers.1", "model.norm", "head"],
     "embed, layers 0-1, norm, head"),
    (["h.0", "h.1", "h.3"], "0-1, 3"),
    (["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
     "encoder.block 0-1, decoder.block 0-1"),
    (["conv1.0", "layer1.0.conv", "layer1.1.conv", "fc"], "conv1 0, layer1.0-1.conv, fc"),
    (["9", "10", "x7y8z", "x7y9z"], "9-10, x7y8-9z"),
])
def test_layers_are_named_by_ranges(names: list[str], text: str) -> None:
    graph = LayerGraph(name="toy", kinds={"k": LayerKind()},
                       layers=tuple(Layer(name=name, kind="k") for name in names))
    assert LayerNames(graph).text(range(len(names))) == text


def test_figures_in_words() -> None:
    assert [seconds(x) for x in (0, 12.3456, 0.0123456, 1.5e-5, 123456.7)] == [
        "0 s", "12.35 s", "12.35 ms", "15.00 µs", "123,457 s"]
    assert [gib(x) for x in (0, 1, GIB, -3 * GIB)] == ["0.00", "< 0.01", "1.00", "-3.00"]
    assert scaled(989.4e12, "FLOP/s") == "989 TFLOP/s"
    assert scaled(25e9, "B/s") == "25.0 GB/s"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_progress_line_shows_incumbent_and_bound() -> None:
    state = SimpleNamespace(incumbent_s=2.5, bound_s=2.0, candidates=7, solved=3, message="pp 4")
    assert describe(state) == "best 2.500 s | bound 2.000 s | 7 candidates, 3 solved | pp 4"
    state.incumbent_s = state.bound_s = None
    assert describe(state).startswith("best - | bound - |")


def read_until(terminal: int, wanted: str) -> str:
    """What the terminal was told, which may come in pieces, up to `wanted` or a minute."""
    text, end = "", time.monotonic() + 60
    while wanted not in text and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 10_000).decode()
    return text


def test_progress_line_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress_line(quiet=False) as progress:
        assert progress is None
    main, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        with progress_line(quiet=True) as progress:
            assert progress is None
        with progress_line(quiet=False) as progress:
            assert progress is not None
            progress(SimpleNamespace(incumbent_s=2.5, bound_s=2.0, candidates=7, solved=3,
                                     message=""))
        assert "best 2.500 s | bound 2.000 s" in read_until(main, "2.000 s")
    os.close(main)


def test_catalogue_lists_models_and_topologies() -> None:
    assert "8,030,261,248" in catalogue.models()
    for name in topology_files.names():
        assert f"\n{name} " in catalogue.topologies()
    text = catalogue.topology("dgx-h100:2+l4x8")
    assert "24 devices in 3 hosts" in text
    assert "cited" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_aliases_find_the_same_model() -> None:
    assert models.resolve("Llama-3-8B") == models.resolve("llama3-8b")


def test_catalogue_counts_as_the_graphs_do() -> None:
    for entry in models.catalogue():
        if entry.name in ("gpt2", "llama3-8b"):
            graph = models.resolve(entry.name)
            assert entry.num_parameters == graph.num_parameters
            assert entry.num_layers == len(graph.layers)
