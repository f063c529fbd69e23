"""Cases about throughput: which of two layouts is faster, and by how much if the case says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import planner
from planner.cost.collectives import all_gather_seconds
from planner.costing import Coster
from planner.layout import Mesh, Prediction
from planner.request import Request
from planner.topology import HostGroup, Link, Topology
from profiler.device import Device, load_device
from tests.planner.cases.graphs import decoder
from tests.planner.cases.layouts import (
    GB,
    device_states_gb,
    fits,
    hosts,
    model,
    predict,
    states_gb,
    topology,
)

FULL = {"recompute": "full"}


def two_devices(device: Device, bandwidth_bytes_per_s: float, efficiency: float,
                latency_s: float = 5.7e-6) -> Topology:
    """One host of two."""
    link = Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s,
                efficiency=efficiency)
    return Topology(name="two", hosts=(HostGroup(
        count=1, devices_per_host=2, device=device, device_link=link, network_card=link,
        cards_per_host=1),))


def test_c73_fsdp_beats_tp_on_8_devices() -> None:
    graph, batch = model("llama3-8b"), Request(global_batch=8, seq_len=8192)
    fsdp = predict(graph, "dgx-h100", batch, dp_shard=8, **FULL)
    mixed = predict(graph, "dgx-h100", batch, dp_shard=2, tp=4, micro_batch=4, **FULL)
    assert fsdp.mfu / mixed.mfu == pytest.approx(26.9 / 22.4, rel=0.1)


@pytest.mark.parametrize(("billions", "hidden", "num_layers"), [
    (1, 2048, 20), (8, 4096, 40), (10, 4096, 48)])
def test_c75_pp_beats_tp_inside_a_node(billions: int, hidden: int, num_layers: int) -> None:
    graph = decoder("bert", num_layers=num_layers, hidden=hidden, ffn=4 * hidden,
                    heads=hidden // 64, vocabulary=30592, gated=False, tied=True)
    assert graph.num_parameters / GB == pytest.approx(billions, rel=0.1)
    same: dict[str, Any] = {
        "global_batch": 256 * 8, "seq_len": 512, "precision": "bf16-mixed", "micro_batch": 8,
        "dp_shard": 1, "dp_replicate": 1}
    tp = planner.plan(graph, "dgx-a100-80g", tp=8, pp=1, **same).prediction
    pp = planner.plan(graph, "dgx-a100-80g", tp=1, pp=8, schedule="1f1b", **same).prediction
    assert tp is not None and pp is not None
    assert tp.step_s / pp.step_s > 1.3


def test_c76_two_stages_with_sequence_parallelism_beat_eight_with_full_recompute() -> None:
    graph, batch = model("llama3-70b"), Request(global_batch=512, seq_len=8192)
    how = {"tp": 8, "reshard": False}
    eight = predict(graph, "dgx-h100:16", batch, pp=8, dp_shard=2, **FULL, **how)
    two = predict(graph, "dgx-h100:16", batch, pp=2, dp_shard=8, recompute="selective", **how)
    readme = predict(graph, "dgx-h100:96", replace(batch, global_batch=768), pp=2, dp_shard=48,
                     recompute="selective", **how)
    assert [device_states_gb(p) for p in (two, readme)] == [
        pytest.approx(33.1, rel=0.02), pytest.approx(27.6, rel=0.02)]
    assert fits(two)
    assert two.mfu / eight.mfu == pytest.approx(420.5 / 296.5, rel=0.1)


def a10_nodes(count: int) -> Topology:
    """Nodes of two A10, with the bandwidth between them that the case derives."""
    between = Link(bandwidth_bytes_per_s=1.9e9, latency_s=35e-6)
    group = hosts("ethernet-25g", count, devices=2, device="a10", between_hosts=between).hosts[0]
    return Topology(name="a10", hosts=(replace(group, cards_per_host=1),))


def on_a10(count: int, **how: int | bool) -> Prediction:
    """One sample a device."""
    return predict(model("qwen2.5-1.5b"), a10_nodes(count),
                   Request(global_batch=2 * count, seq_len=2048), **FULL, **how)


def test_c81_two_slow_nodes_are_slower_than_one() -> None:
    one, two = on_a10(1, dp_shard=2), on_a10(2, dp_shard=4)
    assert two.step_s > 3 * one.step_s  # 8.68 s to 2.46 s, at a batch that is not told
    assert two.samples_per_s < one.samples_per_s
    kept = on_a10(2, dp_shard=4, reshard=False)  # ZeRO-1 across the nodes
    assert kept.step_s < two.step_s


def test_c81_gathering_over_two_nodes_moves_three_quarters() -> None:
    """2.3 GB at 1.9 GB/s: 1.24 s more in forward than on one node."""
    graph = model("qwen2.5-1.5b")
    coster = Coster(graph, a10_nodes(2), Request(global_batch=4, seq_len=2048))
    span = coster.placement(Mesh(dp_shard=4)).span(4)
    assert all_gather_seconds(2 * graph.num_parameters, span) == pytest.approx(1.24, rel=0.05)


def test_c81_hsdp_across_two_slow_nodes_beats_zero_3() -> None:
    assert on_a10(2, dp_shard=2, dp_replicate=2).step_s < on_a10(2, dp_shard=4).step_s


def test_c82_zero_3_falls_with_every_node_and_full_states_need_many() -> None:
    graph = model("qwen2.5-72b")

    def priced(nodes: int, **how: int | bool) -> Prediction:
        return predict(graph, f"aws-p4d:{nodes}", Request(global_batch=8 * nodes, seq_len=2048),
                       **FULL, **how)

    whole = [priced(nodes, dp_shard=8 * nodes) for nodes in (2, 4, 8, 16, 32)]
    rates = [p.tokens_per_s_per_device for p in whole]
    assert rates == sorted(rates, reverse=True)
    assert [fits(p) for p in whole] == [False, False, True, True, True]
    inside = priced(8, dp_shard=8, dp_replicate=8)
    assert not fits(inside)
    assert device_states_gb(inside) == pytest.approx(2 * 72, rel=0.02)  # 16 bytes over 8
    weights = priced(8, dp_shard=64, reshard=False).stages[0]
    assert states_gb(weights, ("compute_copies",)) / 8 == pytest.approx(18, rel=0.02)


def test_c87_gradients_over_pcie_cost_two_devices_their_gain() -> None:
    """Larger local batches and accumulation win it back."""
    graph = decoder("as-large-as-sdxl", num_layers=32, hidden=2560, ffn=10240, heads=40,
                    vocabulary=1024, gated=False)
    assert graph.num_parameters / GB == pytest.approx(2.6, rel=0.05)
    where = two_devices(load_device("h100-pcie-80g"), 63e9, 0.76)
    fast = two_devices(load_device("h100-pcie-80g"), 300e9, 0.8)

    def gain(devices: Topology, micro_batch: int, num_micro_batches: int) -> float:
        """Throughput of two devices over one."""
        samples = micro_batch * num_micro_batches
        batch = Request(global_batch=samples, seq_len=1024, precision="bf16")
        alone = predict(graph, devices, batch, micro_batch=micro_batch)
        both = predict(graph, devices, replace(batch, global_batch=2 * samples), dp_replicate=2,
                       micro_batch=micro_batch)
        return 2 * alone.step_s / both.step_s

    small = gain(where, 1, 1)
    assert small < 1.6
    assert small < gain(where, 4, 1) < 2
    assert small < gain(where, 1, 4) < 2
    assert small < gain(fast, 1, 1) < 2


def titan_rtx() -> Device:
    """The chip of the RTX 2080 Ti with all of its cores and 24 GB."""
    device = load_device("rtx-2080ti")
    peaks = device.peak_flops_per_s | {"float32": 16.3e12, "float16": 65.2e12}
    return replace(device, name="titan-rtx", memory_bytes=24 * 2**30, peak_flops_per_s=peaks,
                   memory_bandwidth_bytes_per_s=672e9)


def nvlink_penalty() -> float:
    """Step of GPT-2 by DDP over PCIe through host memory, over the step by two NVLinks."""
    batch = Request(global_batch=8, seq_len=1024, precision="fp32")
    pcie, nvlink = (
        predict(model("gpt2"), where, batch, dp_replicate=2, micro_batch=4).step_s
        for where in (two_devices(titan_rtx(), 15.75e9, 0.4),
                      two_devices(titan_rtx(), 50e9, 0.85, 1.9e-6)))
    return pcie / nvlink


def test_c88_nvlink_wins() -> None:
    assert 1.02 < nvlink_penalty() < 1.3


@pytest.mark.xfail(strict=True, reason="the model hides the reduction behind backward, that of "
                                       "the tied table too, which is ready only at its end; "
                                       "measured, most of it was exposed")
def test_c88_by_a_third() -> None:
    assert nvlink_penalty() == pytest.approx(131 / 101, rel=0.1)


STAGES = {
    "stage 0": {"dp_replicate": 8},
    "stage 1": {"dp_shard": 8, "reshard": False},
    "stage 2": {"dp_shard": 8, "reshard": False, "each_micro_batch": True},
    "stage 3": {"dp_shard": 8, "each_micro_batch": True}}


@pytest.mark.parametrize(("billions", "hidden", "num_layers", "feasible"), [
    (0.41, 1024, 28, ["stage 0", "stage 1", "stage 2", "stage 3"]),
    (0.53, 1536, 16, ["stage 0", "stage 1", "stage 2", "stage 3"]),
    (3.43, 2560, 42, ["stage 2", "stage 3"]),
    (7.66, 4096, 37, ["stage 3"])])
def test_c90_which_zero_stage(billions: float, hidden: int, num_layers: int,
                              feasible: list[str]) -> None:
    graph = decoder("gpt3", num_layers=num_layers, hidden=hidden, ffn=4 * hidden,
                    heads=hidden // 64, vocabulary=50304, gated=False, tied=True)
    assert graph.num_parameters / GB == pytest.approx(billions, rel=0.02)
    batch = Request(global_batch=64, seq_len=1024, precision="fp16-mixed")
    priced = {name: predict(graph, topology("dgx1-v100"), batch, micro_batch=2, **how)
              for name, how in STAGES.items()}
    assert [name for name in STAGES if fits(priced[name])] == feasible
    assert priced["stage 1"].step_s < priced["stage 0"].step_s
    assert priced["stage 2"].step_s < priced["stage 3"].step_s
