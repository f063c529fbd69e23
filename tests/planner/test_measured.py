"""What was measured comes first: interpolation by hand, what lies outside, and how it is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import inputs
from planner.cost.collectives import all_gather_seconds, all_reduce_seconds, send_seconds
from planner.cost.compute import Shard, layer_compute
from planner.cost.memory import activation_memory
from planner.costing import Coster
from planner.layout import LayerRun, Layout, Mesh, Reference, Schedule, Stage
from planner.link_fits import with_links
from planner.measured import MeasuredLayers, choose_profile
from planner.pricing import candidate_of, price
from planner.request import Request
from planner.topology import Topology
from planner.topology_groups import Placement
from profiler.documents import dump
from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph
from profiler.links import LinkFit, LinkPoint, Links
from profiler.profile import FrameSeconds, LayerBytes, LayerSeconds, Profile, UpdateSeconds
from tests.planner.instances import make_blocks, make_topology

SEQ_LEN = 48


def row(kind: str = "block", micro_batch: int = 1, seq_len: int = SEQ_LEN, tp: int = 1,
        forward_s: float = 1.0) -> LayerSeconds:
    return LayerSeconds(kind=kind, micro_batch=micro_batch, seq_len=seq_len, tensor_parallel=tp,
                        forward_s=forward_s, backward_s=2 * forward_s,
                        recompute_selective_s=forward_s / 4, recompute_full_s=forward_s,
                        spread=0.01, num_repeats=5)


def profiled(*rows: LayerSeconds, **changes: Any) -> LayerGraph:
    import random

    made = make_blocks(random.Random(3), 0, 4, 0)
    profile = Profile(**{"device": "toy-0", "dtype": "float32", "hardware": "here", "versions": {},
                         "date": "2000-01-01", "layers": rows} | changes)
    return replace(made, sample="tokens", profiles=(profile,))


def shard(micro_batch: int, seq_len: int = SEQ_LEN, tp: int = 1) -> Shard:
    return Shard(micro_batch=micro_batch, seq_len=seq_len, tp=tp, dtype="float32", compute_bytes=4)


def layers(graph: LayerGraph) -> MeasuredLayers:
    return MeasuredLayers(graph, graph.profiles[0])


def cluster(devices: int = 2) -> Topology:
    return make_topology(1, devices, 2**34)


def test_between_micro_batches_time_is_linear() -> None:
    found = layers(profiled(row(forward_s=1.0), row(micro_batch=4, forward_s=2.5)))
    times = found.times("block", shard(2))
    assert times is not None
    assert (times.forward_s, times.backward_s) == pytest.approx((1.5, 3.0))
    assert (times.recompute_selective_s, times.recompute_full_s) == pytest.approx((0.375, 1.5))
    assert times.source == "measured"
    assert found.times("block", shard(5)) is None
    assert found.times("block", shard(2, tp=2)) is None


def test_between_lengths_time_per_token_is_linear() -> None:
    """t = 2 s + 0.5 s^2, as of work per token and attention, is met exactly."""
    def t(length: int) -> float:
        return 2.0 * length + 0.5 * length**2

    found = layers(profiled(row(seq_len=64, forward_s=t(64)), row(seq_len=256, forward_s=t(256))))
    times = found.times("block", shard(1, 128))
    assert times is not None
    assert times.forward_s == pytest.approx(t(128))
    assert found.times("block", shard(1, 512)) is None


def test_outside_the_measured_sizes_the_analytic_form_is_scaled_and_said() -> None:
    graph = profiled(row(micro_batch=2))
    device = cluster().hosts[0].device
    kind = graph.kinds["block"]
    times = layers(graph).seconds("block", shard(8), device)
    expected = (layer_compute(kind, shard(8), device).forward_s
                / layer_compute(kind, shard(2), device).forward_s)
    assert times.source == "extrapolated"
    assert times.forward_s == pytest.approx(expected)
    unmeasured = MeasuredLayers(graph, None).seconds("block", shard(8), device)
    assert unmeasured == layer_compute(kind, shard(8), device)
    assert unmeasured.source == "analytic"


def test_the_profile_of_the_device_dtype_and_nearest_load_is_taken() -> None:
    graph = profiled(row())
    few, many = (replace(graph.profiles[0], num_processes=n) for n in (2, 8))
    graph = replace(graph, profiles=(few, many))
    assert choose_profile(graph, "toy-0", "float32", 4) == few
    assert choose_profile(graph, "toy-0", "float32", 6) == many
    assert choose_profile(graph, "toy-0", "bfloat16", 4) is None
    assert choose_profile(graph, "h100-sxm-80g", "float32", 4) is None


def request(**changes: Any) -> Request:
    return Request(**{"global_batch": 4, "seq_len": SEQ_LEN, "precision": "fp32",
                      "memory_margin": 0.0} | changes)


def layout(graph: LayerGraph, mesh: Mesh, micro_batch: int, **changes: Any) -> Layout:
    made = request(**changes)
    run = LayerRun(first_layer=0, num_layers=len(graph.layers))
    return Layout(model=Reference(name="toy"), topology=Reference(name="toy"), request=made,
                  mesh=mesh, micro_batch=micro_batch, stages=(Stage(runs=(run,)),),
                  num_micro_batches=made.global_batch // (micro_batch * mesh.dp))


def test_a_measured_step_is_the_sum_of_its_layers_and_the_update() -> None:
    update = UpdateSeconds(optimizer="adamw", fused=True, stored_dtype="float32",
                           num_parameters=1000, update_s=3e-3, norm_s=1e-3, temporary_bytes=0,
                           spread=0.0)
    graph = profiled(row(micro_batch=2, forward_s=1.0), updates=(update,))
    trainable = sum(p.numel for _, p in graph.iter_parameters() if p.trainable)
    priced = price(graph, cluster(1), layout(graph, Mesh(), 2))
    assert priced.prediction is not None
    assert priced.prediction.step_s == pytest.approx(2 * 4 * 3.0 + trainable * 4e-6)
    assert priced.prediction.measured_share == pytest.approx(1.0)
    assert priced.prediction.sources["forward_compute"] == "measured"
    assert priced.prediction.sources["optimizer_step"] == "measured"


def test_what_is_not_measured_is_said() -> None:
    graph = profiled(row(micro_batch=2))
    priced = price(graph, cluster(), layout(graph, Mesh(dp_shard=2), 1))
    assert priced.prediction is not None
    assert priced.prediction.sources["forward_compute"] == "extrapolated"
    assert priced.prediction.sources["optimizer_step"] == "analytic"
    assert priced.prediction.measured_share == 0.0


def test_waiting_is_of_the_rows_that_measured_it() -> None:
    graph = profiled(replace(row(forward_s=4.0), backward_s=9.0, wait_s=1.0),
                     replace(row(micro_batch=2, forward_s=1.0), backward_s=16.0, wait_s=1.0),
                     row(micro_batch=4))
    measured = MeasuredLayers(graph, graph.profiles[0])
    assert measured.wait_s_per_root == pytest.approx(2.0 / (2 + 3 + 1 + 4))
    assert MeasuredLayers(graph, None).wait_s_per_root == 0.0
    assert MeasuredLayers(graph, profiled(row()).profiles[0]).wait_s_per_root == 0.0


def test_a_frame_is_of_the_nearest_size() -> None:
    def frame(micro_batch: int, tp: int, seconds: float) -> FrameSeconds:
        return FrameSeconds(micro_batch=micro_batch, seq_len=SEQ_LEN, tensor_parallel=tp,
                            forward_s=seconds)
    measured = layers(profiled(row(), frames=(frame(1, 1, 1.0), frame(3, 1, 2.0),
                                              frame(1, 4, 5.0))))
    assert [measured.frame_s(shard(size)) for size in (1, 2, 3, 8)] == [1.0, 1.5, 2.0, 2.0]
    assert measured.frame_s(shard(2, tp=4)) == measured.frame_s(shard(1, tp=8)) == 5.0
    assert measured.frame_s(shard(1, seq_len=2 * SEQ_LEN)) == 1.0
    assert layers(profiled(row())).frame_s(shard(1)) == 0.0


def test_every_stage_but_the_first_runs_the_frame() -> None:
    frames = (FrameSeconds(micro_batch=1, seq_len=SEQ_LEN, forward_s=3.0),)
    graph, without = profiled(row(), frames=frames), profiled(row())
    stages = tuple(Stage(runs=(LayerRun(first_layer=k, num_layers=1),)) for k in range(4))
    for mesh, chunks in ((Mesh(pp=4), 1), (Mesh(pp=2), 2)):
        made = replace(
            layout(graph, Mesh(), 1, global_batch=4), mesh=mesh, num_micro_batches=4, stages=stages,
            schedule=Schedule(name="1f1b" if chunks == 1 else "interleaved", chunks=chunks))
        priced, plain = (price(g, cluster(4), made).prediction for g in (graph, without))
        assert priced is not None and plain is not None
        frame_s = [stage.micro_batch_s.get("stage_frame", 0.0) for stage in priced.stages]
        assert frame_s == ([0.0, 3.0, 3.0, 3.0] if chunks == 1 else [3.0, 6.0])
        assert priced.step_terms_s["stage_frame"] == 4 * max(frame_s)
        assert priced.sources["stage_frame"] == "measured"
        assert "stage_frame" not in plain.step_terms_s
        # (m - 1/v) of the slowest rank, and all ranks' by v
        more = (4 - 1 / chunks) * max(frame_s) + sum(frame_s) / chunks
        assert priced.step_s - plain.step_s == pytest.approx(more)


def test_costs_of_replicas_that_wait_depend_on_the_micro_batches() -> None:
    for wait_s, times in ((1.0, 4), (None, 1)):
        graph = profiled(replace(row(), wait_s=wait_s))
        coster = Coster(graph, cluster(2), request(global_batch=8))
        made = layout(graph, Mesh(dp_replicate=2), 1, global_batch=8)
        assert coster.times_of(candidate_of(made)) == times


def test_a_fused_update_is_not_an_unfused_one() -> None:
    made = [UpdateSeconds(optimizer="adamw", fused=fused, stored_dtype="float32",
                          num_parameters=1000, update_s=seconds, norm_s=1e-3, temporary_bytes=0,
                          spread=0.0) for fused, seconds in ((True, 1.0), (False, 4.0))]
    graph = profiled(row(), updates=tuple(made))
    for update in made:
        coster = Coster(graph, cluster(1), request(fused_optimizer=update.fused))
        assert coster.measured[0].update(coster.request) == update


def held(micro_batch: int, kept: tuple[int, int, int], peaks: tuple[int, int]) -> LayerBytes:
    return LayerBytes(kind="block", micro_batch=micro_batch, seq_len=SEQ_LEN, saved=(),
                      kept_bytes=kept[0], kept_selective_bytes=kept[1], kept_full_bytes=kept[2],
                      forward_peak_bytes=peaks[0], backward_peak_bytes=peaks[1])


def test_measured_bytes_come_first_between_the_measured_sizes() -> None:
    graph = profiled(row(), memory=(held(1, (1000, 400, 10), (1300, 1500)),
                                    held(3, (3000, 1200, 30), (3900, 4500))))
    coster = Coster(graph, cluster(1), layout(graph, Mesh(), 2).request)
    given = coster.graph.kinds["block"].inputs[0].bytes_at(2, SEQ_LEN, 4)  # what enters
    kind = graph.kinds["block"]
    found = {mode: coster.activations_of("block", mode, shard(2))  # type: ignore[arg-type]
             for mode in ("none", "selective", "full")}
    assert {mode: one.saved_bytes - given for mode, one in found.items()} == {
        "none": 2000, "selective": 800, "full": 20}
    # The peak of forward leaves what is kept, that of backward begins with all that was dropped.
    assert {mode: one.working_set_bytes for mode, one in found.items()} == {
        "none": 3000 - 2000, "selective": 3000 - 800, "full": 3000 - 20}
    outside = coster.activations_of("block", "none", shard(4))
    assert outside == activation_memory(kind, "none", shard(4))


def test_memory_says_what_is_measured() -> None:
    update = UpdateSeconds(optimizer="adamw", fused=True, stored_dtype="float32",
                           num_parameters=1000, update_s=3e-3, norm_s=1e-3, temporary_bytes=7000,
                           spread=0.0)
    graph = profiled(row(micro_batch=2), memory=(held(2, (1000, 400, 10), (1300, 1500)),),
                     updates=(update,), context_bytes=12345)
    for micro_batch, how in ((2, "measured"), (1, "traced")):
        priced = price(graph, cluster(1), layout(graph, Mesh(), micro_batch))
        assert priced.prediction is not None
        sources = priced.prediction.sources
        assert sources["activations"] == sources["working_set"] == how
        assert sources["optimizer_temporaries"] == sources["context"] == "measured"
        assert priced.prediction.stages[0].memory_bytes["context"] == 12345
    coster = Coster(graph, cluster(1), layout(graph, Mesh(), 2).request)
    assert coster.temporary_bytes == 7.0  # of each parameter
    analytic = price(profiled(row(micro_batch=2)), cluster(1), layout(graph, Mesh(), 2))
    assert analytic.prediction is not None
    assert analytic.prediction.sources["context"] == "device file"


def test_all_micro_batches_but_the_first_add_their_gradients() -> None:
    steps = []
    for accumulate_s in (None, 0.5):
        graph = profiled(replace(row(micro_batch=1, forward_s=1.0), accumulate_s=accumulate_s))
        priced = price(graph, cluster(1), layout(graph, Mesh(), 1))
        assert priced.prediction is not None
        steps.append(priced.prediction.step_s)
    count = layout(graph, Mesh(), 1).num_micro_batches
    assert count > 1
    assert steps[1] - steps[0] == pytest.approx((count - 1) * 4 * 0.5)


def links(**changes: Any) -> Links:
    def fit(collective: Any, size: int, hosts: int, at_once: int, slope: float) -> LinkFit:
        return LinkFit(collective=collective, group_size=size, num_hosts=hosts,
                       groups_at_once=at_once, latency_s=1e-3, s_per_byte=slope, error=0.0,
                       points=tuple(point(b, 1e-3 + b * slope) for b in (1024, 2**20)))

    def point(num_bytes: int, seconds: float) -> LinkPoint:
        """Short messages count by the low percentile, long ones by the median."""
        long = num_bytes >= 2**20
        return LinkPoint(num_bytes=num_bytes, low_s=seconds * (0.9 if long else 1.0),
                         median_s=seconds * (1.0 if long else 9.0), num_repeats=5)

    fits = (fit("all_reduce", 2, 1, 1, 1e-8), fit("all_reduce", 2, 1, 2, 3e-8),
            fit("all_gather", 2, 1, 1, 2e-8), fit("send", 2, 1, 1, 5e-8))
    return Links(**{"hardware": "here", "backend": "nccl", "versions": {}, "date": "2000-01-01",
                    "processes_per_host": 4, "fits": fits} | changes)


def test_measured_collectives_are_taken_by_the_shape_of_their_groups() -> None:
    whole = with_links(cluster(4), links())
    alone, both = Placement(whole, 2).span(2), Placement(whole, 4).span(2)
    assert all_reduce_seconds(1024, alone) == pytest.approx(1e-3 + 1024e-8)
    assert all_reduce_seconds(1024, both) == pytest.approx(1e-3 + 3 * 1024e-8)
    assert all_gather_seconds(2**21, alone) == pytest.approx(1e-3 + 2 * 2**21 * 1e-8)
    # Two groups at once were not measured, nor were four members: analytic.
    plain = Placement(cluster(4), 4)
    assert all_gather_seconds(1024, both) == all_gather_seconds(1024, plain.span(2))
    assert all_reduce_seconds(1024, Placement(whole, 4).span(4)) == all_reduce_seconds(
        1024, plain.span(4))
    edge = Placement(whole, 2).pipeline_edge(1, degree=2)
    assert send_seconds(1024, edge) == pytest.approx(1e-3 + 5 * 1024e-8)


def test_the_slowdown_beside_a_collective_replaces_the_devices() -> None:
    made = with_links(cluster(), links(overlap_slowdown=1.7))
    assert {group.device.overlap_slowdown for group in made.hosts} == {1.7}
    assert made.hosts[0].device.sources["overlap_slowdown"].startswith("measured")


def test_links_of_another_backend_are_refused() -> None:
    with pytest.raises(InvalidInput, match="measured over gloo"):
        with_links(cluster(), links(backend="gloo"))


def test_a_layout_finds_its_links_again(tmp_path: Path) -> None:
    graph, path = profiled(row(micro_batch=2)), tmp_path / "links.json"
    path.write_text(dump(links()))
    devices = cluster()
    made = layout(graph, Mesh(dp_replicate=2), 2)
    plain = inputs.check(made, graph, devices).layout
    with_measured = inputs.check(made, graph, devices, links=path).layout
    assert plain.prediction is not None and with_measured.prediction is not None
    assert with_measured.prediction.step_s != plain.prediction.step_s
    assert with_measured.prediction.sources["gradient_reduction"] == "extrapolated"
    assert with_measured.links is not None
    assert with_measured.links.name == str(path)
    assert Coster(graph, with_links(devices, path), request()).links is not None
