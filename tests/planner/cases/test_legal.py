"""Cases about legality: what is refused, with which values and which way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import planner
from planner.capabilities import load_capabilities
from planner.cost.memory import local_parameters
from planner.costing import Coster
from planner.division import divisible
from planner.layout import Mesh
from planner.legality import padding_notes, violations
from planner.request import Request
from planner.space import legal_tensor_degrees
from planner.topology import Topology
from profiler.errors import InvalidInput, UnsupportedLayout
from profiler.layer_graph import LayerGraph
from tests.planner.cases.graphs import decoder, gpt_13b, join, tower
from tests.planner.cases.layouts import hosts, model, predict, topology, write


def coster(graph: LayerGraph, devices: Topology | str, seq_len: int = 4096,
           global_batch: int = 64) -> Coster:
    where = topology(devices) if isinstance(devices, str) else devices
    return Coster(graph, where, Request(global_batch=global_batch, seq_len=seq_len))


def refused(graph: LayerGraph, devices: Topology | str, *, seq_len: int = 4096,
            global_batch: int = 64, **how: Any) -> list[str]:
    """Every violation of a layout."""
    found = coster(graph, devices, seq_len, global_batch)
    return violations(found, write(graph, found.request, **how))


def head_degrees(graph: LayerGraph, most: int, *, replicate_kv_heads: bool = False) -> list[int]:
    """Degrees that the heads alone allow, whatever the feed-forward part does."""
    kind = next(kind for kind in graph.kinds.values()
                if kind.tensor_parallel and "heads" in kind.tensor_parallel.divides)
    target = replace(load_capabilities("executor"), replicate_kv_heads=replicate_kv_heads)
    return [tp for tp in range(1, most + 1)
            if not any("heads" in problem for problem in divisible(kind, tp, target))]


# --- heads

def test_c45_legal_degrees_divide_heads_and_kv_heads() -> None:
    graph = model("qwen2.5-7b")
    problems = refused(graph, "dgx-h100", tp=8)
    assert "tp 8: heads 28 is not divisible by 8; legal degrees of qwen2.5-7b: 1, 2, 4" in problems
    assert head_degrees(graph, 28) == [1, 2, 4]
    assert head_degrees(graph, 28, replicate_kv_heads=True) == [1, 2, 4, 28]
    assert legal_tensor_degrees(coster(graph, "dgx-h100:4"), 32) == [1, 2, 4]
    with pytest.raises(InvalidInput, match=r"tp 8 is not legal.* heads 28 .*Legal: 1, 2, 4"):
        planner.plan(graph, "dgx-h100", global_batch=64, seq_len=4096, tp=8)


def test_c46_52_heads() -> None:
    graph = decoder("llama-33b", num_layers=60, hidden=6656, ffn=17920, heads=52,
                    vocabulary=32000)
    problems = refused(graph, "dgx-h100", tp=8)
    assert any("heads 52 is not divisible by 8" in problem and problem.endswith(": 1, 2, 4")
               for problem in problems)
    assert head_degrees(graph, 52) == [1, 2, 4, 13, 26, 52]  # 17920 is not divisible by 13
    assert refused(graph, "dgx-h100", tp=4, dp_shard=2) == []
    assert refused(graph, "dgx-h100", tp=4, pp=2) == []


def test_c48_kv_heads_are_a_capability() -> None:
    graph = model("qwen2.5-3b")
    able = coster(graph, "dgx-h100")
    assert legal_tensor_degrees(able, 8) == [1, 2, 4, 8]
    assert violations(able, write(graph, able.request, tp=8)) == []
    able.capabilities = replace(able.capabilities, replicate_kv_heads=False)
    assert violations(able, write(graph, able.request, tp=4)) == [
        "tp 4: kv_heads 2 is not divisible by 4; legal degrees of qwen2.5-3b: 1, 2"]


def test_kv_heads_that_several_ranks_compute_are_charged_whole() -> None:
    kind = next(k for k in model("qwen2.5-3b").kinds.values() if k.tensor_parallel
                and k.tensor_parallel.kv_parameters)
    assert kind.tensor_parallel is not None
    kv = sum(p.numel for p in kind.parameters if p.name in kind.tensor_parallel.kv_parameters)
    assert kv == 2 * (2048 + 1) * 2 * 128  # k and v: 2 heads of 128, with biases
    rest = {tp: local_parameters(kind, tp, frozenset(kind.tensor_parallel.kv_parameters))[0]
            for tp in (2, 8)}
    assert local_parameters(kind, 2)[0] == rest[2] + kv // 2
    assert local_parameters(kind, 8)[0] == rest[8] + kv


def test_classes_that_the_executor_does_not_know_are_held_whole() -> None:
    graph, request = model("t5-3b"), {"global_batch": 64, "seq_len": 512}
    with pytest.raises(InvalidInput, match=r"tp 2 is not legal.*does not know how to divide T5"):
        planner.plan(graph, "dgx-h100", tp=2, **request)
    problems = refused(graph, "dgx-h100", seq_len=512, tp=2)
    assert any("executor does not know how to divide T5Attention" in p for p in problems)
    with pytest.raises(InvalidInput, match="executor divides only models of tokens, and vit-huge"):
        planner.plan("vit-huge", "dgx-h100", global_batch=64, seq_len=1, tp=2)
    with pytest.raises(InvalidInput, match="precision fp16-mixed: executor runs bf16-mixed, bf16"):
        planner.plan(graph, "dgx-h100", precision="fp16-mixed", **request)


def test_batch_normalization_has_one_micro_batch() -> None:
    layout = planner.plan("resnet-50", "dgx-a100-80g", global_batch=2048, seq_len=1)
    assert layout.num_micro_batches == 1
    with pytest.raises(InvalidInput, match="statistics of the batch"):
        planner.plan("resnet-50", "dgx-a100-80g", global_batch=64, seq_len=1, micro_batch=4, pp=1,
                     dp_shard=2, dp_replicate=1)


def test_c51_a_module_that_cannot_be_divided_is_held_whole() -> None:
    graph = join("internvl2-llama3-76b", tower("vit", num_layers=45, hidden=3200, heads=25),
                 model("llama3-70b"))
    problems = refused(graph, "dgx-h100:4", tp=8, pp=4)
    assert any("heads 25 is not divisible by 8" in problem for problem in problems)
    assert refused(graph, "dgx-h100:4", tp=8, pp=4, whole=("first.block",)) == []
    layout = planner.plan(graph, "dgx-h100:4", global_batch=32, seq_len=4096, tp=8, pp=4)
    divided = {graph.layers[layer].kind: choice.tensor_parallel
               for stage in layout.stages for layer, choice in stage.iter_layers()}
    assert not divided["first.block"]
    assert divided["second.LlamaDecoderLayer"]


def test_c52_64_ranks_do_not_divide_40_heads() -> None:
    graph = model("llama2-13b")
    assert ("tp 64: heads 40 is not divisible by 64; legal degrees of llama2-13b: 1, 2, 4, 8"
            in refused(graph, "dgx-h100:8", tp=64))
    assert refused(graph, "dgx-h100:8", tp=8, dp_shard=8) == []
    problems = refused(graph, "dgx-h100:8", tp=8, dp_shard=2, global_batch=1)
    assert len(problems) == 1
    assert "global batch 1" in problems[0]
    assert "dp_shard 2 x micro_batch 1" in problems[0]
    assert "its divisors: 1" in problems[0]


def test_c52_a_degree_above_the_node_is_slower() -> None:
    graph, request = model("megatron-18b"), Request(global_batch=64, seq_len=2048)
    inside = predict(graph, "dgx-h100:2", request, tp=8, dp_replicate=2)
    across = predict(graph, "dgx-h100:2", request, tp=16)
    assert across.step_s > 1.25 * inside.step_s


# --- vocabulary

@pytest.mark.parametrize(("vocabulary", "tp", "padded"), [
    pytest.param(250_682, 8, 250_688, id="C54"), pytest.param(151_552, 6, 151_554, id="C55")])
def test_vocabulary_is_padded(vocabulary: int, tp: int, padded: int) -> None:
    graph = decoder("padded", num_layers=2, hidden=3072, ffn=12288, heads=96,
                    vocabulary=vocabulary)
    assert refused(graph, "dgx-h100", seq_len=6144, tp=tp) == []
    assert padding_notes(coster(graph, "dgx-h100"), tp) == [
        f"vocabulary {vocabulary} is padded to {padded} for tp {tp}"]


def test_c54_the_padding_is_said_in_the_plan() -> None:
    graph = decoder("bloom", num_layers=2, hidden=2048, ffn=8192, heads=16, vocabulary=250_682,
                    gated=False)
    layout = planner.plan(graph, "dgx-h100", global_batch=8, seq_len=2048, tp=8)
    assert "vocabulary 250682 is padded to 250688 for tp 8" in layout.notes


def test_c55_all_violations_are_told_at_once() -> None:
    graph = decoder("glm-4.7", num_layers=2, hidden=5120, ffn=12288, heads=96, kv_heads=8,
                    vocabulary=151_552)
    problems = refused(graph, "dgx-h100", tp=6)
    assert "sequence length 4096 is not divisible by tp 6 (sequence parallelism)" in problems
    assert any("kv_heads 8 is not divisible by 6" in problem for problem in problems)
    strict = divisible(graph.kinds["head"], 6, replace(load_capabilities("executor"),
                                                       pad_vocabulary=False))
    assert strict == ["vocabulary 151552 is not divisible by 6"]


# --- the mesh

def test_c58_degrees_and_devices_are_both_named_with_legal_products() -> None:
    where = replace(hosts("dgx-h100", 1, devices=2), name="two GPUs")
    assert refused(model("llama3.2-1b"), where, dp_replicate=4, dp_shard=2) == [
        "mesh dp_replicate 4 x dp_shard 2 = 8 devices; two GPUs has 2: legal products: "
        "dp_replicate 2 x dp_shard 1; dp_replicate 1 x dp_shard 2"]


def test_c93_every_factor_of_the_product_is_printed() -> None:
    where = replace(hosts("dgx-h100", 2, devices=2), name="two nodes")
    problems = refused(model("mixtral-8x7b"), where, pp=2, ep=2, dp_shard=2)
    assert problems == [
        "mesh pp 2 x dp_shard 2 x ep 2 = 8 devices; two nodes has 4: legal products: "
        "pp 2 x dp_shard 2", "ep 2: only 1 is supported"]


# --- layers and schedules

def test_c60_dropped_layers_are_refused_and_named() -> None:
    problems = refused(gpt_13b(), "dgx-a100-80g:2", pp=16, blocks=[2] * 16)
    assert problems == ["the stages hold 33 layers; gpt-13b has 42; block.32, block.33, block.34 "
                        "... would be dropped"]


def test_c61_layers_that_chunks_do_not_divide() -> None:
    graph = model("llama3-70b")
    problems = refused(graph, "dgx-a100-80g:2", pp=16, schedule="interleaved", chunks=2,
                       blocks=[2] * 32)
    assert problems == ["the stages hold 65 layers; llama3-70b has 83; model.layers.64, "
                        "model.layers.65, model.layers.66 ... would be dropped"]
    offered = coster(graph, "dgx-a100-80g:2").chain.chunks(16)
    assert offered == [5]  # 80 % (16 * 5) = 0


def test_c72_gradients_are_kept_over_the_micro_batches_of_a_pipeline() -> None:
    graph, where = model("llama3-8b"), "dgx-a100-80g"
    how = {"pp": 2, "dp_shard": 4, "reshard": False}
    assert refused(graph, where, each_micro_batch=True, **how) == [
        "gradient_sync 'each_micro_batch' with pp 2: executor reduces once a step when there are "
        "pipeline stages"]
    with pytest.raises(UnsupportedLayout, match="each_micro_batch"):
        predict(graph, where, Request(global_batch=64, seq_len=2048), each_micro_batch=True, **how)
    stage = predict(graph, where, Request(global_batch=64, seq_len=2048), **how).stages[0]
    # ZeRO-1: whole gradients of 4 bytes beside moments of 8 bytes over 4 ranks.
    assert stage.memory_bytes["gradients"] == pytest.approx(
        2 * stage.memory_bytes["optimizer_states"], rel=0.001)
    layout = planner.plan(graph, where, global_batch=64, seq_len=2048, pp=2, dp_shard=4)
    assert layout.mesh == Mesh(pp=2, dp_shard=4, order=layout.mesh.order)
    assert layout.schedule.gradient_sync == "last_micro_batch"
