"""Cases about memory: model states, frozen parameters, activations, margins.

States are compared in GB (1e9 bytes) with the number of the case, to 2 % unless said otherwise:
bytes per parameter and how they are divided are exact, what differs is what a shape leaves out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner
from planner.cli import run
from planner.explain import Diagnosis
from planner.layout import StagePrediction
from planner.request import Request
from profiler.device import load_device
from profiler.layer_graph import LayerGraph, LayerKind, Parameter
from tests.planner.cases.graphs import chain, decoder, with_lora
from tests.planner.cases.layouts import (
    GB,
    device_states_gb,
    fits,
    hosts,
    model,
    predict,
    states_gb,
)

GIB = 2**30
FULL = {"recompute": "full"}


def request(global_batch: int, seq_len: int, **fields: object) -> Request:
    return Request(global_batch=global_batch, seq_len=seq_len, **fields)  # type: ignore[arg-type]


def fp16(global_batch: int, seq_len: int, **fields: object) -> Request:
    return request(global_batch, seq_len, precision="fp16-mixed", **fields)


def half_gradients_gb(stage: StagePrediction) -> float:
    """States as DeepSpeed counts them: gradients of 2 bytes instead of 4."""
    return states_gb(stage) - stage.memory_bytes.get("gradients", 0) / 2 / GB


def about(number: float) -> object:
    return pytest.approx(number, rel=0.02)


# --- model states

def test_c01_llama2_7b_states_do_not_fit_40_gb_at_any_sequence() -> None:
    graph, where = model("llama2-7b"), "dgx-a100-40g"
    plain = predict(graph, where, request(8, 64), dp_replicate=8)
    sharded = predict(graph, where, request(16, 64), dp_shard=8, reshard=False)
    tp2 = predict(graph, where, request(8, 64), tp=2, dp_shard=4, reshard=False)
    tp8 = predict(graph, where, request(8, 64), tp=8)
    assert [device_states_gb(p) for p in (plain, sharded, tp2, tp8)] == [
        about(121.3), about(50.5), about(30.3), about(15.2)]
    assert [fits(p) for p in (plain, sharded, tp2, tp8)] == [False, False, True, True]
    shorter = predict(graph, where, request(16, 8), dp_shard=8, reshard=False)
    assert not fits(shorter)


def test_c03_llama2_70b_on_8_names_the_fewest_devices_and_the_term() -> None:
    with pytest.raises(planner.Infeasible) as caught:
        planner.plan("llama2-70b", "dgx-a100-80g", global_batch=32, seq_len=4096)
    diagnosis = caught.value.diagnosis
    assert isinstance(diagnosis, Diagnosis)
    states = ("parameters", "gradients", "optimizer_states", "compute_copies")
    assert sum(diagnosis.terms.get(name, 0) for name in states) / GB == about(138.0)
    assert max(diagnosis.terms, key=lambda name: diagnosis.terms[name]) == "optimizer_states"
    assert any("16 devices instead of 8" in text for text in diagnosis.suggestions)
    # The maintainers ran it on 32: ZeRO-1 beside TP and PP keeps more.
    layout = planner.plan("llama2-70b", "dgx-a100-80g:2", global_batch=32, seq_len=4096)
    assert layout.prediction is not None and fits(layout.prediction)


def test_c04_zero_1_beside_pp_needs_more_than_zero_2_beside_tp() -> None:
    graph = model("llama2-70b")
    how = {"reshard": False, "dp_shard": 4, **FULL}
    for where, expected in (("dgx-a100-80g:4", True), ("dgx-a100-40g:4", False)):
        a = predict(graph, where, fp16(4, 4096), tp=8, **how)
        b = predict(graph, where, fp16(16, 4096), tp=4, pp=2, **how)
        assert half_gradients_gb(a.stages[0]) == about(47.4)
        assert half_gradients_gb(b.stages[0]) == about(60.4)
        assert states_gb(a.stages[0]) < states_gb(b.stages[0])
        assert fits(a) == expected
        assert not fits(b)


def test_c04_the_device_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["llama2-70b", "--global-batch", "16", "--seq-len", "4096"]) == 2
    assert "--topology is needed" in capsys.readouterr().err


def qwen15_7b() -> LayerGraph:
    return decoder("qwen1.5-7b", num_layers=32, hidden=4096, ffn=11008, heads=32,
                   vocabulary=151_936)


def test_c06_states_that_fit_are_not_the_whole() -> None:
    graph = qwen15_7b()
    eight = predict(graph, "dgx-a100-40g", fp16(8, 512), dp_shard=8, reshard=False)
    many = predict(graph, "dgx1-v100:8", fp16(64, 512), dp_shard=64, reshard=False)
    assert half_gradients_gb(eight.stages[0]) == about(29.0)
    assert half_gradients_gb(many.stages[0]) == about(17.1)
    stage = eight.stages[0]
    assert states_gb(stage) * GB < stage.capacity_bytes
    beside = {name: size for name, size in stage.memory_bytes.items() if name in (
        "context", "communicators", "activations", "working_set")}
    assert len(beside) == 4
    assert beside["working_set"] > 6 * graph.kinds["head"].num_parameters  # its gradients' buckets
    assert beside["activations"] > 512 * 151_936 * 4  # logits in float32
    assert stage.capacity_bytes < load_device("a100-40g").memory_bytes * 0.93  # the margin
    assert not fits(eight)  # as observed


def test_c07_zero_divides_by_the_data_parallel_degree_alone() -> None:
    graph = model("megatron-39b")
    by_degree = {dp: predict(graph, "dgx1-v100:6", fp16(dp, 1024), tp=8, dp_shard=dp,
                             reshard=False, **FULL) for dp in (1, 4, 6)}
    moments = {dp: p.stages[0].memory_bytes["optimizer_states"] for dp, p in by_degree.items()}
    assert [moments[1] / moments[dp] for dp in (4, 6)] == [about(4), about(6)]
    replicated = predict(graph, "dgx1-v100:6", fp16(1, 1024), tp=8, **FULL)
    assert device_states_gb(by_degree[1]) == device_states_gb(replicated)
    # 8, 32 and 48 devices: the maintainers say about 48.
    assert [fits(by_degree[dp]) for dp in (1, 4, 6)] == [False, False, True]


def test_c09_zero_2_replicates_every_expert() -> None:
    graph = decoder("qwen3-vl-30b-a3b", num_layers=48, hidden=2048, ffn=768, heads=32, kv_heads=4,
                    head_dim=128, vocabulary=151_936, experts=128, experts_per_token=8)
    kept = predict(graph, "dgx-h100:4", request(32, 8192), dp_shard=32, reshard=False, **FULL)
    assert kept.stages[0].memory_bytes["compute_copies"] / GB == about(62.1)
    assert half_gradients_gb(kept.stages[0]) == about(75.7)
    assert not fits(kept)
    assert fits(predict(graph, "dgx-h100:4", request(32, 8192), dp_shard=32, **FULL))


def test_c10_72b_over_16_devices_leaves_nothing() -> None:
    graph = model("qwen2.5-72b")
    mixed = predict(graph, "dgx-a100-80g:2", request(16, 2048), dp_shard=16, **FULL)
    assert device_states_gb(mixed) == about(73.4)
    assert not fits(mixed)
    assert fits(predict(graph, "dgx-a100-80g:4", request(32, 2048), dp_shard=32, **FULL))
    plain = predict(graph, "dgx-a100-80g:2", request(16, 2048, precision="bf16"), dp_shard=16,
                    **FULL)
    assert 16 * device_states_gb(plain) == pytest.approx(600, rel=0.05)  # what the table meant
    assert fits(plain)


def test_c12_zero_2_keeps_all_weights_whatever_is_trainable() -> None:
    graph = model("llama2-70b")
    lora, batch = with_lora(graph, 8), request(8, 2048)
    how = {"dp_shard": 8, **FULL}
    for some in (graph, lora):
        kept = predict(some, "dgx-a100-80g", batch, reshard=False, **how)
        assert kept.stages[0].memory_bytes["compute_copies"] / GB == about(138.0)
        assert not fits(kept)
    sharded = predict(lora, "dgx-a100-80g", batch, **how)
    assert fits(sharded)
    assert 11 < sharded.stages[0].total_memory_bytes / GB < 70


def test_c13_bytes_per_parameter_are_of_the_recipe() -> None:
    graph, where = model("llama2-70b"), "dgx-a100-80g"
    bf16 = predict(graph, where, request(8, 2048, precision="bf16", optimizer="lion"), dp_shard=8,
                   **FULL)
    stage = bf16.stages[0]
    assert states_gb(stage, ("parameters", "gradients")) == about(34.5)
    assert states_gb(stage) == about(51.7)
    assert fits(bf16)
    mixed = predict(graph, where, request(8, 2048), dp_shard=8, **FULL)
    assert device_states_gb(mixed) == about(138.0)
    assert not fits(mixed)


def test_c15_estimates_name_what_they_include() -> None:
    graph = model("llama3.1-70b")
    prediction = predict(graph, "dgx-h100:8", request(64, 1024), dp_shard=64, **FULL)
    assert 64 * device_states_gb(prediction) == about(1129)
    assert graph.num_parameters * 2 / GB == about(141)
    assert {"parameters", "gradients", "optimizer_states", "activations", "working_set",
            "context", "communicators"} <= prediction.stages[0].memory_bytes.keys()


@pytest.mark.parametrize(("devices", "mixed", "plain"), [(4, 27.0, 13.5), (8, 13.5, 6.74)])
def test_c16_a_range_with_its_assumptions(devices: int, mixed: float, plain: float) -> None:
    graph = model("llama2-7b")
    for precision, expected in (("bf16-mixed", mixed), ("bf16", plain)):
        prediction = predict(graph, "dgx-a100-40g", request(devices, 512, precision=precision),
                             dp_shard=devices)
        assert device_states_gb(prediction) == about(expected)
        assert fits(prediction)


@pytest.mark.usefixtures("with_loss_scaling")
def test_c18_lion_on_v100_16_gb_needs_32_devices() -> None:
    graph = decoder("mpt-30b", num_layers=48, hidden=7168, ffn=28672, heads=64, vocabulary=50432,
                    gated=False, tied=True)
    table_gb = 2 * graph.kinds["head"].num_parameters / GB  # stays gathered: it is tied
    for count, expected in ((3, 15.0), (4, 11.3)):
        where = hosts("dgx1-v100", count, device="v100-16g")
        prediction = predict(graph, where, fp16(8 * count, 2048, optimizer="lion"),
                             dp_shard=8 * count, **FULL)
        assert device_states_gb(prediction) == about(expected + table_gb)
    with pytest.raises(planner.Infeasible) as caught:
        planner.plan(graph, hosts("dgx1-v100", 3, device="v100-16g"), global_batch=24,
                     seq_len=2048, precision="fp16-mixed", optimizer="lion")
    diagnosis = caught.value.diagnosis
    assert isinstance(diagnosis, Diagnosis)
    assert any("32 devices instead of 24" in text for text in diagnosis.suggestions)


def test_c19_fsdp_holds_one_unit_and_the_next_not_the_model() -> None:
    graph = model("qwen2.5-32b")
    prediction = predict(graph, "dgx-h100:2", request(16, 1024), dp_shard=16, **FULL)
    stage = prediction.stages[0]
    assert states_gb(stage) == about(32.8)
    assert "compute_copies" not in stage.memory_bytes
    assert stage.memory_bytes["working_set"] < 0.2 * 2 * graph.num_parameters
    assert fits(prediction)


def test_c21_states_are_not_all_that_is_measured() -> None:
    graph = decoder("gpt-2.35b", num_layers=27, hidden=2560, ffn=10240, heads=32,
                    vocabulary=51200, gated=False)
    stage = predict(graph, "dgx-a100-80g", fp16(1, 1024)).stages[0]
    assert half_gradients_gb(stage) == pytest.approx(16 * graph.num_parameters / GB, rel=0.001)
    assert half_gradients_gb(stage) == about(37.6)
    assert stage.total_memory_bytes / GB > 37.9


def test_c24_fp32_accumulation_keeps_whole_gradients() -> None:
    graph, where, batch = model("llama3-8b"), "dgx-a100-80g", request(16, 2048)
    zero_0 = predict(graph, where, batch, dp_replicate=8, **FULL)
    zero_1 = predict(graph, where, batch, dp_shard=8, reshard=False, **FULL)
    assert [device_states_gb(p) for p in (zero_0, zero_1)] == [about(144.5), about(60.2)]
    assert [fits(p) for p in (zero_0, zero_1)] == [False, True]
    assert zero_1.stages[0].memory_bytes["gradients"] / graph.num_parameters == about(4)


# --- frozen parameters

def test_c25_only_trainable_tensors_have_gradients_and_moments() -> None:
    small, unit = 106_496, 1_451_376_640

    def prediction(*, trainable: bool) -> StagePrediction:
        kind = LayerKind(parameters=(
            Parameter(name="weight", shape=(unit - small,), trainable=trainable),
            Parameter(name="lora", shape=(small,))))
        graph = chain("unit", {"unit": kind}, [("unit", 1)], 1)
        return predict(graph, "dgx-a100-80g", request(8, 64), dp_shard=8).stages[0]

    for trainable, numel in ((False, 1.065e5), (True, 1.451e9)):
        memory = prediction(trainable=trainable).memory_bytes
        assert memory["gradients"] * 8 / 4 == about(numel)
        assert memory["optimizer_states"] * 8 / 8 == about(numel)


def test_c28_the_shortfall_is_beside_the_weights() -> None:
    graph = with_lora(model("llama2-70b"), 8)
    where = hosts("ethernet-25g", 2, devices=8, device="a10")
    plain = predict(graph, where, request(16, 2048), dp_shard=16)
    stage = plain.stages[0]
    assert stage.memory_bytes["parameters"] / GB == about(8.6)
    assert not fits(plain)
    assert max(stage.memory_bytes, key=lambda name: stage.memory_bytes[name]) == "activations"
    assert fits(predict(graph, where, request(16, 2048), dp_shard=16, **FULL))


# --- activations, communicators, margins

def test_c30_a_plan_to_the_last_byte_does_not_fit() -> None:
    graph = model("llama3-70b")
    batch = request(32, 4096)
    assert 0.08 <= batch.memory_margin <= 0.10
    how = {"tp": 4, "pp": 4, "dp_shard": 2, "reshard": False, "schedule": "interleaved"}
    five = predict(graph, "dgx-h100:4", batch, chunks=5, **how)
    ten = predict(graph, "dgx-h100:4", batch, chunks=10, **how)
    needed = [max(s.total_memory_bytes for s in p.stages) for p in (five, ten)]
    assert needed[1] < needed[0]  # 10 chunks passed where 5 failed now and then
    tight = hosts("dgx-h100", 4, memory_bytes=int(needed[0] / 0.98))
    assert not fits(predict(graph, tight, batch, chunks=5, **how))
    assert fits(predict(graph, tight, replace(batch, memory_margin=0.0), chunks=5, **how))


def test_c37_checkpoints_alone_exceed_the_card() -> None:
    graph = decoder("gemma-31b", num_layers=60, hidden=5376, ffn=21504, heads=32, kv_heads=16,
                    head_dim=168, vocabulary=262_144)
    seq_len = 2**18
    last = seq_len * 5376 * 2  # the input of the output layer, which is no checkpoint
    alone = predict(graph, "dgx-h200:2", request(16, seq_len), dp_shard=16, **FULL)
    divided = predict(graph, "dgx-h200:2", request(4, seq_len), dp_shard=4, tp=4, **FULL)
    kept = [p.stages[0].memory_bytes["activations"] - last for p in (alone, divided)]
    assert [size / GB for size in kept] == [about(169.1), about(42.3)]
    assert kept[0] > load_device("h200").memory_bytes > kept[1]
    assert not fits(alone)


@pytest.mark.parametrize(("degrees", "groups"), [
    ({"dp_shard": 8}, 1), ({"dp_shard": 4, "tp": 2}, 3), ({"dp_shard": 2, "tp": 2, "pp": 2}, 4)])
def test_c42_each_communicator_takes_memory(degrees: dict[str, int], groups: int) -> None:
    """Each axis is one, and the world another where there are several."""
    stage = predict(model("llama3-8b"), "dgx-a100-80g", request(64, 2048), **degrees).stages[0]
    assert 544 * 2**20 <= stage.memory_bytes["communicators"] / groups <= 688 * 2**20


def test_c106_from_8_to_128_devices_only_sharded_states_shrink() -> None:
    graph = model("llama3.1-8b")
    how = {"micro_batch": 2, "recompute": "selective"}
    few, many = (
        predict(graph, hosts("dgx-h100", n, memory_bytes=95 * GIB), request(16 * n, 8192),
                dp_shard=8 * n, **how) for n in (1, 16))
    gib = [p.stages[0].total_memory_bytes / GIB for p in (few, many)]
    assert gib[0] - gib[1] == about(14.0)
    # torchtitan's policy keeps the outputs of every second matmul of a block only: not those of
    # k_proj, o_proj and up_proj, 1024 + 4096 + 14336 features of 2 x 8192 tokens in 32 blocks.
    kept_here_alone = (1024 + 4096 + 14336) * 2 * 8192 * 32 * 2 / GIB
    measured = [pytest.approx(82.4, rel=0.04), pytest.approx(67.0, rel=0.04)]
    assert [size - kept_here_alone for size in gib] == measured
    ratio = many.tokens_per_s_per_device / few.tokens_per_s_per_device
    assert ratio == pytest.approx(5605 / 5762, rel=0.04)
