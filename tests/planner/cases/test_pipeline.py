"""Cases about pipelines: how layers are cut into stages, and what each stage holds."""

from __future__ import annotations

import pytest

import planner
from planner.chain import make_chain
from planner.layout import Layout
from planner.request import Request
from profiler.layer_graph import LayerGraph
from tests.planner.cases.graphs import decoder, gpt_13b, mlp_chain
from tests.planner.cases.layouts import fits, model, predict, topology

GIB = 2**30


def blocks_per_stage(layout: Layout, graph: LayerGraph) -> list[int]:
    """Layers of the repeated kind in each stage."""
    kinds = [layer.kind for layer in graph.layers]
    block = max(set(kinds), key=kinds.count)
    return [sum(kinds[i] == block for i, _ in stage.iter_layers()) for stage in layout.stages]


def test_c60_40_blocks_on_16_stages() -> None:
    """No stage above 3 blocks, none of 40 lost, fewer at the end where the output layer is."""
    graph = gpt_13b()
    layout = planner.plan(graph, "dgx-a100-80g:2", global_batch=64, seq_len=2048, pp=16, tp=1,
                          schedule="1f1b")
    blocks = blocks_per_stage(layout, graph)
    assert sum(blocks) == 40
    assert max(blocks) == 3
    assert blocks[-1] < 3
    assert layout.prediction is not None
    by_hand = predict(graph, "dgx-a100-80g:2", layout.request, pp=16, blocks=[
        2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 3, 3, 3, 2, 2, 2])
    assert layout.prediction.step_s <= by_hand.step_s * (1 + 1e-6)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_c63_early_stages_hold_more_micro_batches(pp: int) -> None:
    graph = mlp_chain("mlp", 2048, 32_896, 128)
    prediction = predict(graph, "dgx-a100-80g", Request(global_batch=32, seq_len=1), pp=pp)
    assert [stage.in_flight for stage in prediction.stages] == [pp - i for i in range(pp)]
    held = [stage.memory_bytes["activations"] for stage in prediction.stages]
    assert [size / held[-1] for size in held] == [pp - i for i in range(pp)]
    if pp == 4:
        parameters = [stage.memory_bytes["parameters"] / 4 for stage in prediction.stages]
        assert parameters == [16_842_752] * 4  # as in the thread's log


def test_c64_the_first_stage_holds_two_micro_batches() -> None:
    graph, batch = gpt_13b(), Request(global_batch=1792, seq_len=2048)
    how = {"tp": 2, "pp": 2, "dp_shard": 14, "reshard": False, "micro_batch": 4}
    first, last = predict(graph, "dgx-a100-80g:7", batch, **how).stages
    assert 1792 // (14 * 4) == 32
    assert (first.in_flight, last.in_flight) == (2, 1)
    device = topology("dgx-a100-80g:7").hosts[0].device
    used = [stage.total_memory_bytes / device.memory_bytes for stage in (first, last)]
    assert used == [pytest.approx(0.70, abs=0.05), pytest.approx(0.50, abs=0.05)]  # observed
    full = predict(graph, "dgx-a100-80g:7", batch, recompute="full", **how).stages
    assert full[0].total_memory_bytes == pytest.approx(full[1].total_memory_bytes, rel=0.05)


UNEVEN = [2] * 35 + [3] + [2] * 3 + [1]
"""The layout of the pull request: Et*2|(t*2|)*34,t*3|(t*2|)*3,tL."""


def test_c66_a_lighter_last_chunk_is_faster_at_the_same_peak() -> None:
    graph, batch = model("llama3-70b"), Request(global_batch=128, seq_len=8192)
    how = {"tp": 4, "pp": 8, "dp_shard": 2, "reshard": False, "schedule": "interleaved",
           "chunks": 5, "recompute": "selective"}
    even = predict(graph, "dgx-h100:8", batch, **how)
    uneven = predict(graph, "dgx-h100:8", batch, blocks=UNEVEN, **how)
    assert uneven.step_s < even.step_s
    assert uneven.replay_s < even.replay_s
    peak = [max(s.total_memory_bytes for s in p.stages) for p in (uneven, even)]
    assert peak[0] == pytest.approx(peak[1], rel=0.01)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=pytest.mark.xfail(
    strict=True, reason="the stages of an interleaved schedule hold equally many blocks "
                        "(planner/chain.py, Chain.chunks): uneven ones can be priced, not found"))])
def test_c66_the_planner_makes_the_last_stage_lighter(schedule: str) -> None:
    graph = model("llama3-70b")
    layout = planner.plan(graph, "dgx-h100:8", global_batch=128, seq_len=8192, tp=4, pp=8,
                          dp_shard=2, schedule=schedule)
    blocks = blocks_per_stage(layout, graph)
    assert sum(blocks) == 80
    assert blocks[-1] < max(blocks)


def test_c67_peak_of_the_first_stage() -> None:
    stage = predict(model("llama2-7b"), "dgx-a100-80g:2", Request(global_batch=2048, seq_len=4096),
                    pp=2, dp_shard=8, reshard=False, micro_batch=2).stages[0]
    outside = stage.memory_bytes["context"] + stage.memory_bytes["communicators"]
    assert (stage.total_memory_bytes - outside) / GIB == pytest.approx(69.1, rel=0.03)


def test_c70_a_tied_table_is_held_twice_and_reduced_once_a_step() -> None:
    graph = model("gpt2-xl")
    batch = Request(global_batch=64, seq_len=1024)
    numel = graph.kinds["Embedding"].num_parameters
    apart = predict(graph, "dgx-a100-80g", batch, pp=2, micro_batch=4)
    alone = predict(graph, "dgx-a100-80g", batch, micro_batch=4)
    held = [stage.memory_bytes["tied_parameters"] for stage in apart.stages]
    assert held == [alone.stages[0].memory_bytes["tied_parameters"]] * 2
    assert held[0] == pytest.approx(18 * numel, rel=0.001)
    link = topology("dgx-a100-80g").hosts[0].device_link.effective_bytes_per_s
    assert apart.step_terms_s["tied_reduction"] == pytest.approx(4 * numel / link, rel=0.01)
    assert "tied_reduction" not in alone.step_terms_s


def test_c100_an_encoder_decoder_is_cut_by_cost() -> None:
    """Decoder layers attend twice: stages of equal time hold fewer of them."""
    graph = model("t5-3b")
    layout = planner.plan(graph, "dgx-a100-80g:2", global_batch=64, seq_len=512, pp=4)
    assert layout.prediction is not None
    seconds = [sum(stage.micro_batch_s.values()) for stage in layout.prediction.stages]
    assert max(seconds) < 1.05 * min(seconds)
    sizes = [stage.num_layers for stage in layout.stages]
    assert sum(sizes) == len(graph.layers)
    assert min(sizes[0], sizes[1]) > max(sizes[2], sizes[3])


def test_c100_a_cut_in_the_decoder_carries_the_encoder_output() -> None:
    """One tensor crosses inside the encoder; behind it the encoder's output goes along."""
    graph = model("t5-3b")
    names = [layer.name for layer in graph.layers]
    bytes_of = {part: make_chain(graph).crossing_before(names.index(f"{part}.block.12")).bytes_at(
        1, 512, 2) for part in ("encoder", "decoder")}
    hidden = 512 * 1024 * 2
    for forward, backward in zip(bytes_of["encoder"], bytes_of["decoder"], strict=True):
        assert backward - forward == pytest.approx(hidden, rel=0.1)


@pytest.mark.usefixtures("with_loss_scaling")
def test_c102_a_proven_plan_for_192_v100() -> None:
    graph = decoder("starcoder", num_layers=40, hidden=6144, ffn=24576, heads=48, kv_heads=1,
                    vocabulary=49152, gated=False, tied=True)
    layout = planner.plan(graph, "dgx1-v100:24", global_batch=512, seq_len=8192,
                          precision="fp16-mixed")
    assert layout.proof is not None and layout.prediction is not None
    assert layout.proof.status == "OPTIMAL"
    assert layout.mesh.num_devices <= 192
    assert fits(layout.prediction)
    assert [i for stage in layout.stages for i, _ in stage.iter_layers()] == list(range(42))
    assert all(other.step_s >= layout.prediction.step_s for other in layout.alternatives)
