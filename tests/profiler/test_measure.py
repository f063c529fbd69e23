"""Measuring on this CPU: what is measured, kept, resumed and refused; never how long it took."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planner.cost.memory import local_parameters
from planner.topology_files import resolve
from profiler import __main__ as command
from profiler import measure, measure_device
from profiler.building import Subject, build_subject, materialise
from profiler.capture import capture, time_frame, time_outside
from profiler.device import Device
from profiler.documents import dump, load
from profiler.errors import Interrupted, InvalidInput
from profiler.hugging_face import trace_hugging_face
from profiler.layer_graph import LayerGraph
from profiler.local_parameters import local_tensor
from profiler.measure import Case, Measurement, cases_of
from profiler.measure_device import DeviceOptions
from profiler.measure_update import update_seconds
from profiler.memory_agreement import agreements
from profiler.model_command import ModelOptions, profile_model
from profiler.profile import Profile
from profiler.shards import CannotDivide, Emulation, HeldWhole, divided
from profiler.team import Team
from profiler.timing import Budget, Clock, Samples
from tests.profiler.trace_models import FAMILIES

CPU = torch.device("cpu")
LENGTH = 64
QUICK = Budget(least=1, most=1)
EMPTY = Profile(device="cpu", dtype="float32", hardware="here", versions={}, date="2000-01-01")


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return trace_hugging_face(FAMILIES["llama"], name="llama")


@pytest.fixture(scope="module")
def subject(graph: LayerGraph) -> Subject:
    return build_subject(graph, CPU, torch.float32)


def measurement(subject: Subject, save: Callable[[Profile], None] = lambda profile: None,
                **changes: Any) -> Measurement:
    return Measurement(**{"subject": subject, "team": Team(1, 0), "budget": QUICK, "done": EMPTY,
                          "save": save, "advance": lambda text: None} | changes)


def test_a_frame_holds_no_weights_and_its_layers_become_real(subject: Subject) -> None:
    assert all(p.untyped_storage().nbytes() == 4 for p in subject.model.parameters())
    block = subject.model.get_submodule(subject.names[1])
    real = materialise(block, CPU)
    assert sum(p.untyped_storage().nbytes() for p in real.parameters()) == 4 * sum(
        p.numel() for p in block.parameters())
    assert subject.model.model.rotary_emb.inv_freq.abs().sum() > 0  # buffers are real


def test_equal_layers_are_captured_once(subject: Subject) -> None:
    calls = capture(subject, 2, LENGTH)
    assert len(calls.of_layer) == len(subject.names)
    assert len({calls.of_layer[layer] for layer in (1, 2, 3)}) == 1
    assert len(calls.distinct) == 4
    outside = time_outside(subject, 2, LENGTH, {
        layer: calls.distinct[number].result for layer, number in calls.of_layer.items()},
        Clock(CPU), 2)
    assert set(outside) == set(calls.of_layer)
    assert all(len(s.parts["forward"]) == 2 for s in outside.values())
    assert all(p.grad is None for p in subject.model.parameters())


def test_a_frame_is_timed_up_to_the_middle(subject: Subject) -> None:
    calls = capture(subject, 2, LENGTH)
    results = {layer: calls.distinct[number].result for layer, number in calls.of_layer.items()}
    forwards = {name: module.forward for name, module in subject.model.named_modules()}
    flushed: list[Clock] = []

    class Watched(Clock):
        def flush(self) -> None:
            flushed.append(self)
    found = time_frame(subject, 2, LENGTH, results, Watched(CPU), 3)
    assert found is not None and len(found.parts["forward"]) == 3
    assert len(flushed) == 4  # in a step a frame finds cold caches
    assert {name: module.forward for name, module in subject.model.named_modules()} == forwards
    middle = len(subject.names) // 2
    with pytest.raises(KeyError):  # what the layers before it return is needed
        time_frame(subject, 2, LENGTH, {middle: results[middle]}, Clock(CPU), 1)
    with pytest.raises(KeyError):
        time_frame(subject, 2, LENGTH, {k: v for k, v in results.items() if k != middle - 1},
                   Clock(CPU), 1)
    time_frame(subject, 2, LENGTH, {k: v for k, v in results.items() if k < middle}, Clock(CPU), 1)


@pytest.mark.parametrize("degree", [2, 4])
def test_a_shard_holds_what_the_planner_says(graph: LayerGraph, subject: Subject,
                                             degree: int) -> None:
    for layer in (0, 1, len(graph.layers) - 1):
        kind = graph.kind_of(layer)
        module = subject.model.get_submodule(graph.layers[layer].name)
        group = Emulation(degree, LENGTH)
        local = divided(module, kind, group, CPU)
        held = sum(local_tensor(p).numel() for p in local.parameters())
        assert held == sum(local_parameters(kind, degree))


def test_what_cannot_be_divided_is_said(graph: LayerGraph, subject: Subject) -> None:
    with pytest.raises(CannotDivide, match=r"degree 3 does not divide .*kv_heads 2"):
        divided(subject.model.get_submodule(graph.layers[1].name), graph.kind_of(1),
                Emulation(3, LENGTH), CPU)
    gpt2 = trace_hugging_face(FAMILIES["gpt2"], name="gpt2")
    subject = build_subject(gpt2, CPU, torch.float32)
    positions = next(i for i, name in enumerate(subject.names) if name.endswith("wpe"))
    with pytest.raises(HeldWhole):
        divided(subject.model.get_submodule(subject.names[positions]), gpt2.kind_of(positions),
                Emulation(2, LENGTH), CPU)


def test_every_kind_is_measured_at_every_size(graph: LayerGraph, subject: Subject) -> None:
    profile = measurement(subject).run(list(cases_of((1, 2), (LENGTH,), (2,))))
    measured = {(row.kind, row.micro_batch, row.tensor_parallel) for row in profile.layers}
    assert measured == {(k, b, t) for k in graph.kinds for b in (1, 2) for t in (1, 2)}
    assert not profile.failures
    assert {(row.micro_batch, row.tensor_parallel) for row in profile.frames} == {
        (b, t) for b in (1, 2) for t in (1, 2)}
    assert all(row.forward_s > 0 for row in profile.frames)
    assert all(row.forward_s > 0 and row.num_repeats == 1 for row in profile.layers)
    for row in profile.memory:
        if row.tensor_parallel == 1 and row.kind == "LlamaDecoderLayer":
            parts = {tensor.name: tensor.num_bytes for tensor in row.saved}
            assert parts["mlp.down_proj"] == row.micro_batch * LENGTH * 160 * 4
            assert row.kept_full_bytes < row.kept_selective_bytes < row.kept_bytes
            assert row.kept_bytes <= row.forward_peak_bytes
    assert all(row.accumulate_s is not None for row in profile.layers)
    compared = {(one.kind, one.quantity): one for one in agreements(graph, profile)}
    assert {one.quantity for one in compared.values() if one.kind == "Linear"} == {
        "saved", "saved, selective recompute", "forward working set", "forward peak",
        "backward working set", "backward peak"}
    block = compared["LlamaDecoderLayer", "saved"]
    assert not block.differs and block.traced > 5 * 10**5
    assert not compared["LlamaDecoderLayer", "saved, selective recompute"].differs
    assert compared["Linear", "backward peak"].has_outside  # the loss
    load_again = replace(graph, profiles=(profile,))
    assert json.loads(dump(load_again))["profiles"]


def test_a_measurement_goes_on_where_it_was_interrupted(subject: Subject) -> None:
    saved: list[Profile] = []

    def save(profile: Profile) -> None:
        saved.append(profile)
        if len(saved) == 2:
            raise KeyboardInterrupt

    cases = list(cases_of((1,), (LENGTH,), ()))
    with pytest.raises(KeyboardInterrupt):
        measurement(subject, save).run(cases)
    before = saved[-1].layers
    assert len(before) == 2
    done = measurement(subject, done=saved[-1]).run(cases)
    assert done.layers[:2] == before
    assert len(done.layers) == len(subject.graph.kinds)


def test_out_of_memory_is_a_result(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "available_bytes", lambda device, processes: 0)
    profile = measurement(subject).run([Case(micro_batch=1, seq_len=LENGTH)])
    assert not profile.layers
    assert {failure.reason for failure in profile.failures} == {"out_of_memory"}
    assert {failure.kind for failure in profile.failures} == set(subject.graph.kinds)


def test_an_allocation_that_fails_is_a_result(subject: Subject,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "work_seconds", fail)
    profile = measurement(subject).run([Case(micro_batch=1, seq_len=LENGTH)])
    assert {failure.note for failure in profile.failures} == {"CUDA out of memory"}


def test_a_team_takes_the_mean_and_the_slowest_of_each_repeat(
        monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Samples({"forward": [1.0, 4.0], "backward": [5.0, 5.0]})
    other = torch.tensor([[7.0, 3.0], [2.0, 2.0]], dtype=torch.float64)  # backward, forward

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        tensor.copy_(tensor + other if op == dist.ReduceOp.SUM else torch.maximum(tensor, other))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    mean, slowest = Team(2, 0).together(mine)
    assert mean.parts == {"backward": [6.0, 4.0], "forward": [1.5, 3.0]}
    assert slowest.parts == {"backward": [7.0, 5.0], "forward": [2.0, 4.0]}
    assert Team(1, 0).together(mine) == (mine, mine)


def test_the_update_is_of_the_models_own_parameters(graph: LayerGraph) -> None:
    update = update_seconds(graph, CPU, "float32", "adamw", 2**30, QUICK)
    assert update.num_parameters == graph.num_parameters
    assert update.update_s > 0 and update.norm_s > 0


def test_a_command_resumes_its_partial_file(graph: LayerGraph, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(FAMILIES["llama"]))
    options = ModelOptions(model=str(config), output=str(tmp_path / "out.json"), quiet=True,
                           seq_lens=(LENGTH,), most_s=0.0, memory=False)
    calls: list[int] = []
    original = measure.work_seconds

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(measure, "work_seconds", interrupted)
    with pytest.raises(Interrupted, match="goes on from there"):
        profile_model(options)
    assert (tmp_path / "out.json.partial").exists()
    with pytest.raises(InvalidInput, match="another measurement"):
        profile_model(replace(options, dtype="bfloat16"))
    done = profile_model(options)
    assert len(calls) == 2 + len(graph.kinds) - 1
    assert load(LayerGraph, options.output) == done
    assert {update.fused for update in done.profiles[0].updates} == {True, False}
    assert not (tmp_path / "out.json.partial").exists()


def test_a_measured_device_can_be_a_topologys(tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_device, "CPU_SIZES", (16, 64))
    monkeypatch.setattr(measure_device, "CPU_LENGTHS", (32, 64))
    monkeypatch.setattr(measure_device, "CPU_BYTES", (2**14, 2**24))
    made, _ = measure_device.measure_device(DeviceOptions(name="mine", most_s=0.0))
    assert made.sources["matmul_efficiency"].startswith("measured: ")
    assert made.sources["overlap_slowdown"].startswith("not measured")
    assert max(made.matmul_efficiency.fraction) == 1.0
    (tmp_path / "mine.json").write_text(dump(made))
    (tmp_path / "cluster.yaml").write_text(
        "preset: cpu-host\ngpus_per_node: 2\ndevice: mine.json\n")
    assert load(Device, tmp_path / "mine.json") == made
    assert resolve(tmp_path / "cluster.yaml").hosts[0].device == made


@pytest.mark.parametrize(("arguments", "message"), [
    (["model", "gpt2", "-o", "{}/x.json"], "--seq-len is needed"),
    (["model", "gpt2", "--seq-len", "2048", "-o", "{}/x.json"], "at most 1,024"),
    (["model", "gpt2", "--seq-len", "63", "--tensor-parallel", "2", "-o", "{}/x.json"],
     "does not divide"),
    (["model", "gpt2", "--seq-len", "0", "-o", "{}/x.json"], "positive whole numbers"),
    (["model", "gpt7", "--seq-len", "8", "-o", "{}/x.json"], "unknown model"),
    (["model", "gpt2", "--seq-len", "8", "-o", "{}/no/x.json"], "cannot be written"),
    (["links", "-o", "{}/x.json"], "torchrun"),
])
def test_wrong_use_is_one_message(arguments: list[str], message: str, tmp_path: Path,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([argument.format(tmp_path) for argument in arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
