"""Predictions against published measurements: the adapter, the scores, and the compact table."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.published import __main__ as program
from benchmarks.published.adapter import make_case
from benchmarks.published.causes import cause_of, known_causes, largest_terms
from benchmarks.published.fit import Group, Sample, constants_of, errors, fit, seconds
from benchmarks.published.fit_memory import wrong_verdicts
from benchmarks.published.graphs import Dimensions, make_graph
from benchmarks.published.hardware import stack_of
from benchmarks.published.memory import memory_results, peak_bytes
from benchmarks.published.price import Priced, measured_seconds, price_cells, price_rows
from benchmarks.published.score import computed_rows, memory_scores, spearman, sweeps_of
from benchmarks.published.table import (
    MEASURED_COLUMNS,
    Cells,
    MeasuredRow,
    UnusableRow,
    measured_rows,
    memory_rows,
)
from planner.models import resolve
from profiler.documents import to_data
from profiler.layer_graph import LayerGraph

FOLDER = Path(program.__file__).parent
KORTHIKANTI = {
    "row_id": "1", "source_id": "korthikanti_tab5", "model": "GPT-175B", "params_b": "175",
    "layers": "96", "hidden": "12288", "heads": "96", "kv_heads": "96", "ffn": "49152",
    "gated_mlp": "0", "vocab": "51200", "seq": "2048", "gpu": "A100-SXM4-80GB", "gpus": "64",
    "gpus_per_node": "8", "gbs": "64", "mbs": "1", "dp": "1", "tp": "8", "pp": "8", "vpp": "3",
    "cp": "1", "dp_shard": "none", "sp": "1", "recompute": "selective", "precision": "fp16",
    "impl": "Megatron-LM 2022, no flash-attn", "step_time_s": "13.75", "status": "ok"}


def cells(**changes: str) -> Cells:
    return Cells(values=KORTHIKANTI | changes)


def dimensions(graph: LayerGraph) -> Dimensions:
    config = graph.source.hugging_face_config
    assert config is not None
    if "n_embd" in config:
        hidden, heads = config["n_embd"], config["n_head"]
        return Dimensions(layers=config["n_layer"], hidden=hidden, heads=heads, kv_heads=heads,
                          head_dim=hidden // heads, ffn=4 * hidden, gated=False, tied=True,
                          vocabulary=config["vocab_size"], positions=config["n_positions"])
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return Dimensions(layers=config["num_hidden_layers"], hidden=hidden, heads=heads, gated=True,
                      kv_heads=config["num_key_value_heads"], ffn=config["intermediate_size"],
                      head_dim=config.get("head_dim", hidden // heads),
                      vocabulary=config["vocab_size"], tied=config["tie_word_embeddings"])


@pytest.mark.parametrize("name", ["megatron-7.5b", "gpt3-175b", "llama2-70b", "llama3.2-1b"])
def test_graphs_by_dimensions_are_the_traced_ones(name: str) -> None:
    traced = resolve(name)
    made = make_graph(name, dimensions(traced))
    assert to_data(made)["kinds"] == to_data(traced)["kinds"]
    assert to_data(made)["edges"] == to_data(traced)["edges"]
    assert made.num_parameters == traced.num_parameters
    assert made.ties == traced.ties


def test_a_row_becomes_its_layout() -> None:
    case = make_case(cells())
    (layout,) = case.layouts
    assert (layout.mesh.tp, layout.mesh.pp, layout.mesh.dp) == (8, 8, 1)
    assert (layout.schedule.name, layout.schedule.chunks) == ("interleaved", 3)
    assert len(layout.stages) == 24
    assert layout.request.stack == "megatron-lm-2022"
    assert layout.request.sequence_parallel is True
    assert case.topology.num_devices == 64
    assert case.topology.hosts[0].device.name == "a100-80g"


@pytest.mark.parametrize(("changes", "inference"), [
    ({"gpu": "A100"}, "gpu: A100 of 80 GB"),
    ({"heads": ""}, "heads: 96"),
    ({"dp_shard": ""}, "sharding: none"),
    ({"layers": ""}, "layers: 96, from the number of parameters"),
    ({"recompute": "unknown"}, "recompute: not given, the fastest that fits of none, selective, "
                               "full"),
    ({"vocab": "~250k"}, "vocabulary: 250880"),
    ({"vocab": "50257", "tp": "1", "dp": "8"},
     "vocabulary: 50257 padded to 50304, as Megatron-LM does")])
def test_what_is_inferred_is_said(changes: dict[str, str], inference: str) -> None:
    assert inference in make_case(cells(**changes)).inferences


def test_a_cut_that_counts_every_layer() -> None:
    """96 blocks, embedding, norm and head in 8 stages: three of 13 layers, five of 12."""
    layouts = [make_case(cells(source_id=source, gated_mlp="1", vpp="1", sp="0")).layouts[0]
               for source in ("alephalpha", "korthikanti_tab5")]
    sizes = [[sum(run.num_layers for run in stage.runs) for stage in layout.stages]
             for layout in layouts]
    assert sizes == [[13] * 3 + [12] * 5, [13] + [12] * 6 + [14]]
    blocks = [[max(run.num_layers for run in stage.runs) for stage in layout.stages]
              for layout in layouts]
    assert blocks == [[12, 13, 13, 12, 12, 12, 12, 10], [12] * 8]


def test_precisions_of_float8() -> None:
    for text, precision in (("float8 rowwise", "fp8-rowwise-mixed"), ("fp8", "fp8-mixed")):
        assert make_case(cells(precision=text)).layouts[0].request.precision == precision


def test_an_inferred_recompute_that_cannot_be_is_not_taken() -> None:
    stated, inferred = (make_case(cells(source_id=source, recompute="full"))
                        for source in ("vtrain_multi", "vtrain_single"))
    assert stated.layouts[0].stages[0].runs[-1].choice.recompute == "full"
    assert inferred.layouts[0].stages[0].runs[-1].choice.recompute == "none"
    assert any("313 TFLOP/s" in text for text in inferred.inferences)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"n_experts": "8"}, "a mixture of experts"), ({"gpu": "TPU v4"}, "no device file"),
    ({"hidden": "nan"}, "hidden is not given"), ({"hidden": "-4"}, "not a positive number"),
    ({"hidden": "inf"}, "not a positive number"), ({"gpus": "7.5"}, "not a whole number"),
    ({"gpus": "60"}, "is not gpus"), ({"precision": "NVFP4"}, "NVFP4"),
    ({"gbs": "0"}, "gbs is not given"), ({"layers": "4"}, "more stages than layers"),
    ({"seq": "abc"}, "seq is not a number")])
def test_a_row_that_cannot_be_priced_says_why(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        make_case(cells(**changes))


def test_seconds_come_from_tokens_where_they_are_not_stated() -> None:
    assert measured_seconds(cells()) == 13.75
    assert measured_seconds(cells(step_time_s="", tokens_s_gpu="200")) == pytest.approx(
        64 * 2048 / (200 * 64))
    with pytest.raises(UnusableRow, match="no step time"):
        measured_seconds(cells(step_time_s=""))


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # Ranks 0 1.5 1.5 3 against 0 1 2 3: covariance 4.5, variances 4.5 and 5.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 1], [1, 2]) == 0


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def table_of(**changes: str) -> dict[str, str]:
    with (FOLDER / "measured.csv").open(newline="") as file:
        columns = next(csv.reader(file))
    return dict.fromkeys(columns, "") | KORTHIKANTI | changes


def test_every_row_is_priced_or_counted(tmp_path: Path) -> None:
    rows = [table_of(row_id="a"), table_of(row_id="b", status="oom"),
            table_of(row_id="c", step_time_s="nan", tokens_s_gpu="nan"),
            table_of(row_id="d", tp="x")]
    priced, refused = price_rows(measured_rows(write(tmp_path / "t.csv", rows)))
    assert [row.row_id for row in priced] == ["a"]
    assert {row.row_id: row.reason for row in refused} == {
        "b": "the run failed: oom", "c": "no step time", "d": "tp is not a number"}


def test_a_sweep_has_an_order_and_a_regret(tmp_path: Path) -> None:
    rows = [table_of(row_id=str(i), mbs="1", pp=str(p), dp=str(64 // 8 // p), vpp="1",
                     gbs="64", step_time_s=str(t))
            for i, (p, t) in enumerate([(8, 20.0), (4, 19.0), (2, 18.0)] * 4)]
    priced, _ = price_rows(measured_rows(write(tmp_path / "t.csv", rows)))
    (sweep,) = sweeps_of(priced)
    assert sweep.layouts == 12
    fastest = min(priced, key=lambda row: row.predicted_s)
    assert sweep.regret == pytest.approx((fastest.measured_s or 0) / 18.0 - 1)
    assert sweep.chosen == fastest.row_id
    assert sweep.best == "2"


def priced_row(error: float, **changes: str) -> Priced:
    """A row whose prediction is off by a relative error."""
    layout, inferences = price_cells(cells(**changes))
    assert layout.prediction is not None
    row = cells(**changes)
    return Priced(row_id=row.text("row_id"), source_id=row.text("source_id"), cells=row,
                  layout=layout, measured_s=layout.prediction.step_s / (1 + error),
                  inferences=inferences)


def test_causes_are_about_rows_of_their_source_and_direction() -> None:
    causes = known_causes()
    assert len({cause.name for cause in causes.causes}) == len(causes.causes)
    for cause in causes.causes:
        assert set(cause.where) <= set(MEASURED_COLUMNS), cause.name
        assert cause.evidence
    many = {"source_id": "vtrain_multi", "model": "GPT-L48-H8192", "tp": "4", "dp": "2", "vpp": "1",
            "sp": "0", "recompute": "full"}
    found = cause_of(priced_row(-0.2, **many), causes.causes)
    assert found is not None
    assert (found.name, found.kind) == ("many-hosts-tp2-tp4", "unknown")
    for error, changes in ((0.2, {}), (-0.01, {}), (-0.2, {"model": "other"}),
                           (-0.2, {"tp": "8", "dp": "1"}), (-0.2, {"source_id": "elsewhere"})):
        assert cause_of(priced_row(error, **many | changes), causes.causes) is None


def test_a_row_without_a_cause_is_shown_with_its_terms(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [
        table_of(row_id="alone", source_id="elsewhere", step_time_s="20")])
    done = CliRunner().invoke(program.main, ["--table", str(path), "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "published.json").read_text())["worst_rows"]
    assert (row["row_id"], row["cause"]) == ("alone", None)
    assert row["largest_terms"].startswith("backward compute")
    assert "unknown" in done.output
    assert largest_terms(priced_row(0.0), 1).startswith("backward compute")


def test_rows_that_follow_from_one_another_are_found(tmp_path: Path) -> None:
    def rows(bend: float) -> list[dict[str, str]]:
        """Three layouts with 8, 16 and 32 micro-batches; a clock bends the line."""
        return [table_of(row_id=f"{mbs}-{gbs}", gbs=str(gbs), mbs=str(mbs), vpp="1", pp="4", dp="2",
                         step_time_s=repr(0.7 + 0.1 * mbs * (gbs + bend * (gbs > 64))))
                for mbs in (1, 2, 4) for gbs in (16 * mbs, 32 * mbs, 64 * mbs)]

    exact, measured = (price_rows(measured_rows(write(tmp_path / f"{bend}.csv", rows(bend))))[0]
                       for bend in (0.0, 0.5))
    (found,) = computed_rows(exact)
    assert (found.source, found.sets, found.exact) == ("korthikanti_tab5", 3, 3)
    assert computed_rows(measured) == []
    assert computed_rows(exact[:6]) == []


def test_a_run_is_clearly_out_where_one_that_needs_less_is(tmp_path: Path) -> None:
    def fact(name: str, **changes: str) -> dict[str, str]:
        return table_of(fact_id=name, kind="feasibility", verdict="oom", value="", unit="",
                        value_kind="", measured_row_id="", **changes)

    rows = [fact("smallest", mbs="1", recompute="full"), fact("larger", mbs="2", recompute="full"),
            fact("kept", mbs="1", recompute="none"), fact("fits", mbs="4") | {"verdict": "fits"},
            fact("elsewhere", mbs="4", tp="4", dp="2")]
    results, _ = memory_results(memory_rows(write(tmp_path / "m.csv", rows)), ())
    assert {r.row_id for r in results if r.clear} == {"larger", "kept"}
    (score, overall) = memory_scores(results)
    assert (score.clear, overall.clear) == (2, 2)


def test_a_peak_seen_from_a_shell_is_of_the_first_host() -> None:
    layout, _ = price_cells(cells())
    assert layout.prediction is not None
    first, second, *rest = (s.total_memory_bytes for s in layout.prediction.stages)
    assert first > second > max(rest[:-1])
    smaller, *_ = rest
    assert peak_bytes(layout, "GB rounded", 8) == first
    last = peak_bytes(layout, "GiB of the last rank", 8)
    assert last < smaller
    whole = replace(layout, prediction=replace(
        layout.prediction, stages=layout.prediction.stages[::-1]))
    assert peak_bytes(whole, "GB rounded", 8) < peak_bytes(whole, "GB rounded", 64) == first
    assert peak_bytes(whole, "GB rounded up", 8) == first


def test_more_bytes_a_logit_turn_a_verdict() -> None:
    case = make_case(cells(source_id="alephalpha", impl="flash_attention2", model="LLAMA-13B",
                           layers="40", hidden="5120", heads="40", kv_heads="40", ffn="13824",
                           gated_mlp="1", vocab="128000", gpus="8", gbs="64", mbs="4", dp="1",
                           tp="8", pp="1", vpp="1", sp="0", recompute="full", precision="bf16"))
    few, many = (wrong_verdicts([(case, False)], logit_bytes=n) for n in (12, 64))
    assert (few.said_to_fit, many.said_to_fit, few.ran_out) == (1, 0, 1)


@pytest.mark.parametrize(("name", "impl", "stack"), [
    ("gpt3_mcore_te_tp1_pp4", "dev; deterministic-mode", "megatron-core-unfused"),
    ("gpt3_mcore_te_tp1_pp4_resume_torch_dist", "dev; deterministic-mode", "megatron-core"),
    ("gpt3_mcore_te_tp1_pp4_resume_torch_dist", "lts", "megatron-core-unfused"),
    ("gpt3_mcore_tp1_pp4_resume_torch_dist", "dev", "megatron-core-unfused"),
    ("gpt3_7b_tp1_pp4_memory_speed", "dev; deterministic-mode", "megatron-core")])
def test_attention_of_megatrons_tests(name: str, impl: str, stack: str) -> None:
    assert stack_of(cells(source_id="megatron_ci", model=name, impl=impl), []) == stack


def test_deepspeed_of_2021_has_the_kernels_of_its_cluster() -> None:
    assert stack_of(cells(source_id="mtnlg_sec2.4", impl=""), []) == "megatron-deepspeed-2021"
    assert stack_of(cells(source_id="vtrain_multi", impl=""), []) == "megatron-deepspeed"


@pytest.mark.parametrize(("content", "message"), [
    (b"a,b\n1,2\n", "has no column row_id"), (b"\xff\xfe\x00", "is not UTF-8"),
    (b"", "has no column")])
def test_a_hostile_table_is_one_clear_message(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    done = CliRunner().invoke(program.main, ["--table", str(path)])
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.count("\n") == 1
    done = CliRunner().invoke(program.main, ["--table", str(tmp_path / "none.csv")])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)


def test_a_fit_finds_the_constants_that_made_the_rows() -> None:
    group = Group(kernels="toy", devices=("a100-80g",), sources="", models="",
                  constants=("memory",))
    changes = ({}, {"mbs": "2"}, {"recompute": "full", "sp": "0"}, {"pp": "4", "dp": "2"})
    samples = []
    for change in changes:
        case = make_case(cells(**change))
        row = MeasuredRow(row_id="", source_id="", cells=cells(**change), status="ok")
        samples.append(Sample(row=row, model="", kernels="toy", device="a100-80g", case=case,
                              layout=case.layouts[0], measured_s=1.0))
    true = np.array([0.0, 0.0, 0.0, 0.0, -0.1, -0.1, -0.1])
    for sample in samples:
        sample.measured_s = seconds(sample, constants_of(
            group, true, sample.case.topology.hosts[0].device))
    before = np.abs(errors(group, samples, np.zeros(7))).max()
    after = np.abs(errors(group, samples, fit(group, samples, rounds=3))).max()
    assert before > 0.05
    assert after < 0.01


def test_the_compact_table(tmp_path: Path) -> None:
    """Rows of every big source, and errors near to those that the README states."""
    done = CliRunner().invoke(program.main, ["-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "published.json").read_text())
    with (FOLDER / "measured.csv").open(newline="") as file:
        ids = {row["row_id"] for row in csv.DictReader(file)}
    assert 150 <= len(ids) <= 300
    counted = [row["row_id"] for row in data["rows"] + data["refused_rows"]]
    assert sorted(counted) == sorted(ids)
    errors_by_source = {row["source"]: row for row in data["errors"]}
    held_out = {row["source"]: row for row in data["errors_held_out"]}
    assert [row["row_id"] for row in data["worst_rows"]] == [row["row_id"] for row in sorted(
        data["rows"], key=lambda row: -abs(row["error"]))[:10]]
    marks = known_causes().marks
    assert {row["source"] for row in data["above_mark"]} == {
        source for source, row in held_out.items() if row["mean"] > marks.get(source, 1e9)}
    assert errors_by_source["overall"]["median"] < 0.05
    assert held_out["korthikanti_tab5"]["mean"] < 0.035
    assert held_out["sc21_tab1"]["mean"] < 0.05
    assert held_out["llm_foundry"]["mean"] < 0.08
    for picture in ("predicted_against_measured.png", "error_by_source.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
