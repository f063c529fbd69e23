"""The command line: what it prints where, its exit statuses, and every mistake a user can make."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import planner
from planner import inputs, models
from planner.cli import DOCUMENTS, run
from planner.layout import Layout
from profiler.documents import dump, parse, schema
from profiler.errors import Infeasible, Interrupted
from profiler.layer_graph import LayerGraph
from profiler.links import LinkFit, LinkPoint, Links
from profiler.trace import trace_function

ROOT = Path(__file__).parent.parent.parent
SMALL = ["gpt2", "--topology", "dgx-h100", "--global-batch", "64", "--seq-len", "1024"]

Result = tuple[int, str, str]
Command = Callable[..., Result]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path,
            monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in an empty folder: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Result:
        status = run(list(arguments))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return call


def in_subprocess(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "check": False, "timeout": 120} | options
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.run([sys.executable, "-m", "planner", *arguments], env=environment, **options)


@pytest.fixture(scope="module")
def small_layout() -> Layout:
    return planner.plan("gpt2", "dgx-h100", global_batch=64, seq_len=1024)


@pytest.fixture
def layout_file(small_layout: Layout, tmp_path: Path) -> Path:
    path = tmp_path / "layout.json"
    path.write_text(dump(small_layout))
    return path


# --- planning

def test_prints_a_report_and_how_to_keep_the_layout(command: Command, tmp_path: Path) -> None:
    status, out, err = command(*SMALL)
    assert status == 0
    assert out.startswith("gpt2 on dgx-h100: ")
    assert "Not saved" in out
    assert err == ""
    assert list(tmp_path.iterdir()) == []


def test_json_is_the_layout_and_nothing_else(command: Command, small_layout: Layout) -> None:
    status, out, err = command(*SMALL, "--json")
    assert (status, out, err) == (0, dump(small_layout), "")


def test_output_file_is_the_same_layout(command: Command, small_layout: Layout,
                                        tmp_path: Path) -> None:
    status, out, _ = command(*SMALL, "-o", "mine.json")
    assert status == 0
    assert (tmp_path / "mine.json").read_text() == dump(small_layout)
    assert "Written to mine.json" in out


def test_options_may_come_first(command: Command) -> None:
    assert command(*SMALL[1:], "--json", SMALL[0])[0] == 0


def test_fixed_choices_are_kept_to(command: Command) -> None:
    out = command(*SMALL, "--json", "--pp", "2", "--micro-batch", "2", "--schedule", "gpipe",
                  "--recompute", "full", "--precision", "bf16", "--optimizer", "sgd")[1]
    layout = json.loads(out)
    assert layout["mesh"]["pp"] == 2
    assert layout["micro_batch"] == 2
    assert layout["schedule"]["name"] == "gpipe"
    assert layout["request"]["precision"] == "bf16"
    assert all(run["choice"]["recompute"] == "full"
               for stage in layout["stages"] for run in stage["runs"])


def test_report_shows_no_codes_where_nobody_looks() -> None:
    done = in_subprocess(*SMALL, env={"NO_COLOR": "1"})
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr == ""


def test_report_in_a_locale_without_its_characters() -> None:
    done = in_subprocess(*SMALL, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stderr == ""


# --- models and topologies from elsewhere

def test_layer_graph_file(command: Command, small_layout: Layout, tmp_path: Path) -> None:
    graph = planner.load(LayerGraph, ROOT / "planner" / "models" / "gpt2.json")
    (tmp_path / "profile.json").write_text(dump(graph))
    status, out, _ = command("profile.json", *SMALL[1:], "--json")
    assert status == 0
    layout = parse(Layout, json.loads(out), "output")
    assert layout.model.name == "profile.json"
    assert replace(layout, model=small_layout.model) == small_layout


TINY_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}

BUILDER = '''
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.zeros(4, 64)
'''


def test_hugging_face_config(command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    status, out, err = command(".", "--topology", "dgx-h100", "--global-batch", "8",
                               "--seq-len", "256", "--json")
    assert status == 0, err
    assert json.loads(out)["model"]["name"] == "."


def test_function_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "models.py").write_text(BUILDER)
    done = in_subprocess("mypkg.models:build", "--topology", "dgx-h100", "--global-batch", "64",
                         cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mypkg.models:build on dgx-h100: ")


def test_a_model_without_its_loss_is_noted() -> None:
    found = {name: planner.plan(trace_function(f"tests.profiler.trace_models:{name}"), "local:1",
                                global_batch=8, precision="fp32").notes
             for name in ("mlp", "regression")}
    assert "was traced without a loss" in found["mlp"][0]
    assert not found["regression"]


def test_topology_file(command: Command, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("{preset: dgx-h100, nodes: 2, gpus_per_node: 4}")
    status, out, _ = command("gpt2", "-t", "cluster.yaml", *SMALL[3:])
    assert status == 0
    assert "8 x h100-sxm-80g in 2 hosts" in out


# --- check

def test_check_prices_to_the_same_figures(command: Command, layout_file: Path,
                                          small_layout: Layout) -> None:
    status, out, err = command("check", str(layout_file), "--json")
    assert (status, err) == (0, "")
    assert small_layout.prediction is not None
    assert json.loads(out)["prediction"]["step_s"] == small_layout.prediction.step_s
    assert "proof" not in json.loads(out)
    status, out, _ = command("check", str(layout_file))
    assert status == 0
    assert "Legal, and it fits" in out


HAND_WRITTEN = {
    "meshwright": "Layout", "version": 1, "model": {"name": "llama3-8b"},
    "topology": {"name": "dgx-h100"}, "request": {"global_batch": 64, "seq_len": 4096},
    "mesh": {"dp_shard": 8}, "micro_batch": 1, "num_micro_batches": 8, "schedule": {},
    "stages": [{"runs": [{"first_layer": 0, "num_layers": 35, "choice": {"recompute": "full"}}]}]}


def check(command: Command, **changes: Any) -> Result:
    Path("mine.json").write_text(json.dumps(HAND_WRITTEN | changes))
    return command("check", "mine.json")


def test_check_of_a_layout_written_by_hand(command: Command) -> None:
    status, out, err = check(command)
    assert (status, err) == (0, "")
    assert "full" in out


def test_check_says_what_does_not_fit(command: Command) -> None:
    choice = {"recompute": "none"}
    status, out, _ = check(command, micro_batch=8, num_micro_batches=1, stages=[
        {"runs": [{"first_layer": 0, "num_layers": 35, "choice": choice}]}])
    assert status == 3
    assert "Does not fit" in out
    assert "stage 0 on h100-sxm-80g needs" in out
    status, out, err = command("check", "mine.json", "--json")
    assert status == 3
    assert json.loads(out)["prediction"]["stages"]
    assert "stage 0 on h100-sxm-80g needs" in err


def test_check_lists_everything_that_is_illegal(command: Command) -> None:
    status, out, err = check(command, mesh={"dp_shard": 3, "tp": 5}, num_micro_batches=7)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) > 2


def test_check_for_another_model_or_topology(command: Command, layout_file: Path) -> None:
    assert command("check", str(layout_file), "--topology", "dgx-a100-80g")[0] == 0
    status, _, err = command("check", str(layout_file), "--model", "llama3-8b")
    assert status == 2
    assert "layers" in err


def test_check_notices_that_a_reference_has_changed(command: Command, layout_file: Path) -> None:
    data = json.loads(layout_file.read_text())
    data["model"]["digest"] = "sha256:" + "0" * 64
    layout_file.write_text(json.dumps(data))
    status, _, err = command("check", str(layout_file))
    assert status == 2
    assert "model 'gpt2' is not what it was" in err
    assert command("check", str(layout_file), "--model", "gpt2")[0] == 0


# --- the catalogue and the schemas

def test_catalogue(command: Command) -> None:
    assert "llama3-8b" in command("models")[1]
    assert "dgx-h100" in command("topologies")[1]
    assert "16 devices in 2 hosts" in command("topologies", "dgx-h100:2")[1]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_schemas_are_schemas(name: str, command: Command) -> None:
    status, out, _ = command("schema", name)
    assert status == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(out))


def test_documents_hold_to_their_schemas(small_layout: Layout) -> None:
    checked = inputs.check(small_layout)
    for name, record in (("layout", small_layout), ("layer-graph", checked.graph),
                         ("topology", checked.topology)):
        home, kind = DOCUMENTS[name]
        jsonschema.validate(json.loads(dump(record)),
                            schema(getattr(importlib.import_module(home), kind)))


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["check", "--help"], ["gpt2", "--help"]])
def test_help(arguments: list[str], command: Command) -> None:
    status, out, _ = command(*arguments)
    assert status == 0
    assert out.startswith("Usage: plan ")
    assert "plan model " not in out


def test_version(command: Command) -> None:
    assert command("--version")[1] == f"meshwright {planner.__version__}\n"


# --- mistakes: exit status 2 and one message

@pytest.mark.parametrize(("arguments", "message"), [
    (["gpt", *SMALL[1:]], "unknown model 'gpt': did you mean gpt2"),
    (["modles"], "unknown model 'modles'"),
    (["gpt2", "--topology", "dgx-h10", *SMALL[3:]], "did you mean dgx-h100"),
    (["gpt2", "--topology", "dgx-h100:0", *SMALL[3:]], "'0' is not a number of hosts"),
    (["gpt2"], "--topology is needed"),
    (["gpt2", "--topology", "dgx-h100"], "--global-batch is needed"),
    (SMALL[:-2], "sequence length (--seq-len): missing"),
    ([*SMALL[:-1], "1025"], "gpt2 allows at most 1024"),
    (["resnet-50", *SMALL[1:]], "resnet-50 takes images, which have none"),
    ([*SMALL[:-1], "0"], "0 is not in the range"),
    ([*SMALL, "--global-batch", "-4"], "-4 is not in the range"),
    ([*SMALL, "--global-batch", "many"], "'many' is not a valid integer"),
    ([*SMALL, "--global-batch", "9" * 30], "global_batch"),
    ([*SMALL, "--memory-margin", "1.5"], "1.5 is not in the range"),
    ([*SMALL, "--memory-margin", "nan"], "memory_margin"),
    ([*SMALL, "--precision", "int4"], "'int4' is not one of"),
    ([*SMALL, "--for", "nothing"], "unknown target 'nothing'"),
    ([*SMALL, "--time-limit", "0"], "0"),
    ([*SMALL, "--tp", "7"], "7"),
    ([*SMALL, "--dp-shard", "3", "--dp-replicate", "1"], "64"),
    ([*SMALL, "--nonsense"], "No such option"),
    ([*SMALL, "-o", "no/such/folder/x.json"], "there is no folder no/such/folder"),
    ([*SMALL, "-o", "."], "is a directory"),
    (["./absent.json", *SMALL[1:]], "cannot be read"),
    (["./absent", *SMALL[1:]], "a model file is .json or .yaml"),
    (["no.such.module:build", *SMALL[1:]], "cannot be imported"),
    (["\x1b[2J", *SMALL[1:]], "\\x1b[2J"),
    (["check", "absent.json"], "cannot be read"),
    (["check"], "Missing argument"),
    (["schema", "nothing"], "is not one of"),
    (["topologies", "nothing"], "unknown topology"),
])
def test_mistakes(arguments: list[str], message: str, command: Command) -> None:
    status, out, err = command(*arguments)
    assert status == 2
    assert message in err
    assert out == ""


@pytest.mark.parametrize(("text", "message"), [
    ("", "malformed JSON"), ("{", "malformed JSON"), ("[1, 2]", "a model is a LayerGraph"),
    ("null", "a model is a LayerGraph"), ("{}", "this is neither"),
    ('{"meshwright": "Layout"}', "this is a Layout"),
    ('{"meshwright": "LayerGraph", "version": NaN}', "malformed JSON"),
    ('{"meshwright": "LayerGraph", "version": 9}', "version"),
    ('{"meshwright": "LayerGraph", "surprise": 1}', "unknown key"),
    ("[" * 100_000, "malformed JSON"),
    ('{"meshwright": "LayerGraph", "name": "x", "kinds": {}, "layers": []}', "layers"),
    ('{"meshwright": "LayerGraph", "name": "x", "kinds": {}, '
     '"layers": [{"name": "a", "kind": "b"}]}', "which is not in `kinds`"),
    ('{"model_type": "no-such-type"}', "no-such-type"),
])
def test_hostile_models(text: str, message: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(text)
    status, out, err = command("model.json", *SMALL[1:])
    assert status == 2
    assert message in err
    assert out == ""


@pytest.mark.parametrize(("text", "message"), [
    ("nodes: [", "malformed YAML"), ("3", "a topology is a mapping"),
    ("{preset: dgx-h100, nodes: 0}", "nodes"), ("{preset: dgx-h100, nodes: -1}", "nodes"),
    ("{preset: dgx-h100, gpus_per_node: 0}", "gpus_per_node"),
    ("{preset: dgx-h100, nodes: 1.0e+300}", "nodes"),
    ("{preset: dgx-h100, memory_bytes: .nan}", "memory_bytes"),
    ("{preset: dgx-h100, memory_bytes: -5}", "memory_bytes"),
    ("{preset: dgx-h100, color: red}", "color"),
    ("a: &a [x]\nb: [*a, *a]", "aliases are not accepted"),
    ("!!python/object/apply:os.system [id]", "malformed YAML"),
    ("meshwright: Topology\nversion: 2", "version"),
])
def test_hostile_topologies(text: str, message: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    status, out, err = command("gpt2", "--topology", "cluster.yaml", *SMALL[3:])
    assert status == 2
    assert message in err
    assert out == ""


def test_hostile_layouts(command: Command, tmp_path: Path) -> None:
    for changes, message in (
            ({"surprise": 1}, "unknown key"), ({"version": 2}, "version"),
            ({"mesh": {"dp_shard": 0}}, "mesh.dp_shard"), ({"micro_batch": -1}, "micro_batch"),
            ({"stages": []}, "stages"), ({"mesh": {"tp": 10**30}}, "mesh.tp"),
            ({"request": {"global_batch": 1e300, "seq_len": 1}}, "request.global_batch"),
            ({"model": {"name": "nothing"}}, "unknown model"),
            ({"request": {"global_batch": 64, "seq_len": 9000}}, "at most 8192")):
        status, out, err = check(command, **changes)
        assert status == 2, changes
        assert message in err
        assert out == ""


def test_files_too_large_and_not_text(command: Command, tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(100 * 2**20)
    (tmp_path / "binary.json").write_bytes(os.urandom(1000) + b"\xff\xfe")
    for name, message in (("large.json", "a document has at most"), ("binary.json", "UTF-8")):
        for arguments in ([name, *SMALL[1:]], ["check", name]):
            status, _, err = command(*arguments)
            assert status == 2
            assert message in err


def test_all_that_is_missing_is_said_at_once(command: Command) -> None:
    err = command("modles")[2]
    assert "unknown model" in err
    assert "--topology is needed" in err
    assert "--global-batch is needed" in err


# --- what ends a search early

def replace_search(monkeypatch: pytest.MonkeyPatch, outcome: BaseException) -> None:
    def search(*_: object, **__: object) -> Layout:
        raise outcome

    monkeypatch.setattr("planner.search.search", search)


def test_output_is_checked_before_the_search(command: Command,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    replace_search(monkeypatch, AssertionError("searched all the same"))
    assert command(*SMALL, "-o", "no/folder/x.json")[0] == 2


def test_nothing_fits(command: Command, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("{preset: l4x8, gpus_per_node: 1}")
    status, out, err = command("llama3.2-3b", "--topology", "one.yaml", "--global-batch", "8",
                               "--seq-len", "1024")
    assert (status, out) == (3, "")
    assert err.startswith("does not fit: ")
    assert "GiB" in err
    assert len(err.splitlines()) > 1


def test_infeasible_without_a_diagnosis(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_search(monkeypatch, Infeasible("nothing"))
    assert command(*SMALL) == (3, "", "does not fit: nothing\n")


@pytest.mark.parametrize("outcome", [KeyboardInterrupt(), Interrupted("there is no layout yet")])
def test_interrupted_with_nothing(outcome: BaseException, command: Command,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the interrupt comes."""
    replace_search(monkeypatch, outcome)
    status, out, err = command(*SMALL)
    assert (status, out) == (130, "")
    assert err.strip() == "interrupted: there is no layout yet"


@pytest.mark.parametrize("after_s", [0.05, 0.3, 2])
def test_interrupt_keeps_the_best_so_far(after_s: float, tmp_path: Path) -> None:
    """However far it is: a layout and status 0, or nothing and 130; never a traceback."""
    arguments = ["gpt3-175b", "--topology", "dgx-a100-80g:8", "--global-batch", "64",
                 "--seq-len", "2048", "-o", "layout.json"]
    start = "import planner.__main__ as command; print('up', flush=True); command.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", start, *arguments], cwd=tmp_path, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert process.returncode in (0, 130)
    assert (tmp_path / "layout.json").exists() == (process.returncode == 0)
    assert out.startswith("gpt3-175b on ") == (process.returncode == 0)


# --- streams

def test_reader_that_goes_away() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = in_subprocess("models", capture_output=False, stdout=closed,
                             stderr=subprocess.PIPE)
    assert done.returncode == -signal.SIGPIPE
    assert done.stderr == ""


def test_closed_standard_output() -> None:
    done = subprocess.run(["sh", "-c", f"{sys.executable} -m planner models >&-"], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        done = in_subprocess("models", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


def test_output_to_a_device_does_not_replace_it(command: Command) -> None:
    assert command(*SMALL, "-o", "/dev/null")[0] == 0
    assert not Path("/dev/null").is_file()


# --- imports

def test_models_of_the_catalogue_are_planned_without_heavy_imports() -> None:
    code = ("import sys; from planner.cli import run; status = run(sys.argv[1:]); "
            "print(*sys.modules, file=sys.stderr); sys.exit(status)")
    validators = {"pydantic", "pydantic_core", "annotated_types"}  # a third of a second
    for arguments, heavy in ((SMALL, {"torch", "transformers", "ortools", "networkx", *validators}),
                             ([*SMALL, "--json"], {"torch", "ortools", "rich", *validators}),
                             (["models"], {"torch", "ortools", "networkx", "numpy", "rich",
                                           *validators}),
                             (["schema", "request"], {"torch", "ortools", "networkx", "numpy"}),
                             (["launch", "--help"], {"torch", "ortools", "networkx", "numpy"})):
        done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, text=True,
                              capture_output=True, check=True)
        assert not heavy & set(done.stderr.split())


# --- the README

def readme_block(language: str) -> str:
    """The first block of a language."""
    text = (ROOT / "README.md").read_text()
    return text.split(f"```{language}\n", 1)[1].split("```", 1)[0]


def readme_commands() -> list[str]:
    """The `plan` lines of its shell blocks, continued lines joined."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    blocks = text.split("```")[1::2]
    return [line.strip().removeprefix("$ ") for block in blocks
            if block.split("\n", 1)[0].strip() in ("sh", "console") for line in block.splitlines()
            if line.strip().removeprefix("$ ").startswith("plan ")]


def measured_documents() -> dict[str, Any]:
    """What the README's measuring commands write, as small as it can be."""
    points = tuple(LinkPoint(num_bytes=size, low_s=1e-5 + size / 2e11, median_s=1e-5 + size / 2e11,
                             num_repeats=5) for size in (2**20, 2**26))
    fit = LinkFit(collective="all_reduce", group_size=8, latency_s=1e-5, s_per_byte=5e-12,
                  error=0.0, points=points)
    return {"llama3-8b.profile.json": models.resolve("llama3-8b"),
            "links.json": Links(hardware="test", backend="nccl", versions={}, date="2026-01-01",
                                processes_per_host=8, fits=(fit,))}


def test_readme_commands_run(command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"preset": "dgx-h100", "nodes": 1}))
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "models.py").write_text(BUILDER)
    (tmp_path / "mine.json").write_text(readme_block("json"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, document in measured_documents().items():
        (tmp_path / name).write_text(dump(document))
    lines = readme_commands()
    assert len(lines) >= 8
    for line in lines:
        status, _, err = command(*line.split("#")[0].split()[1:])
        assert status == 0, f"{line}: {err}"
