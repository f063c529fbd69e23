"""The cost of a layer put together: what overlaps, what is exposed, what comes once a step."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.compute import ComputeTimes, Shard
from planner.cost.layer import (
    Group,
    LayerCost,
    ParameterCost,
    layer_cost,
    layer_parameters,
    layer_times,
    overlap_extra_s,
    parameter_cost,
    tensor_parallel_seconds,
    tensor_parallel_waits,
)
from planner.cost.memory import layer_memory
from planner.layout import Choice
from planner.request import Request
from planner.topology_groups import Span
from profiler.layer_graph import LayerKind, Parameter, TensorParallel
from tests.planner.instances import per_token

REQUEST = Request(global_batch=8, seq_len=64)  # bf16-mixed, AdamW
SHARD = Shard(micro_batch=2, seq_len=64, tp=4)
MILLION = 10**6


def span(size: int, bytes_per_s: float = 1e11) -> Span:
    """One group in one host, without latency."""
    return Span(size=size, num_groups=1, num_hosts=1, members_per_host=size,
                max_members_per_host=size, groups_per_host=0, device_bytes_per_s=bytes_per_s,
                device_latency_s=0.0, card_bytes_per_s=inf, card_latency_s=0.0)


def group(*, tp: int = 1, shard: int = 1, replicate: int = 1, slowdown: float = 1.0) -> Group:
    return Group(update_bytes_per_s=1e12, norm_bytes_per_s=1e12, overlap_slowdown=slowdown,
                 tp=span(tp), shard=span(shard), replicate=span(replicate))


KIND = LayerKind(
    parameters=(Parameter(name="up", shape=(1000, 500), split="column", split_dim=0),
                Parameter(name="norm", shape=(1000,)),
                Parameter(name="adapter", shape=(500,), trainable=False)),
    tensor_parallel=TensorParallel(divides={"ffn": 1000}, entries=(per_token(1000),),
                                   exits=(per_token(500), per_token(500))))


def test_overlap_by_hand() -> None:
    # 3 s of communication beside 10 s of work: hidden, and work is 10 % slower meanwhile.
    assert overlap_extra_s(10.0, 3.0, 1.1) == pytest.approx(0.3)
    # The other way round 7 s stick out.
    assert overlap_extra_s(3.0, 10.0, 1.1) == pytest.approx(7.3)
    assert overlap_extra_s(10.0, 0.0, 1.1) == 0
    assert overlap_extra_s(0.0, 5.0, 1.1) == 5


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(1, 2))
def test_overlap_never_costs_more_than_one_after_the_other(work: float, a: float, b: float,
                                                           slowdown: float) -> None:
    assert (slowdown - 1) * min(work, a) <= overlap_extra_s(work, a, slowdown) <= a + 1e-12
    less, more = sorted((a, b))
    assert overlap_extra_s(work, less, slowdown) <= overlap_extra_s(work, more, slowdown) + 1e-12
    # A larger step of communication is hidden no better than its parts beside their own work.
    assert overlap_extra_s(work + work, a + b, slowdown) <= (
        overlap_extra_s(work, a, slowdown) + overlap_extra_s(work, b, slowdown) + 1e-12)


def test_parameters_on_one_rank() -> None:
    cost = parameter_cost(MILLION, 0, group(), REQUEST, each_micro_batch=False)
    assert cost.gather_s == cost.reduce_s == cost.reduce_each_s == 0
    # Read parameter, gradient and two moments, write parameter and moments: 28 bytes.
    assert cost.optimizer_s == pytest.approx(28e6 / 1e12)
    assert cost.norm_s == pytest.approx(12e6 / 1e12)


def test_parameters_sharded_and_replicated() -> None:
    cost = parameter_cost(MILLION, 500_000, group(shard=4, replicate=2), REQUEST,
                          each_micro_batch=False)
    # Gathered in bf16, frozen ones too; 3/4 of the bytes pass each link.
    assert cost.gather_s == pytest.approx(3e6 * 3 / 4 / 1e11)
    # Scattered in float32, and the quarter all-reduced between two replicas.
    scatter, replicas = 4e6 * 3 / 4 / 1e11, 2 * 1e6 * 1 / 2 / 1e11
    assert cost.reduce_s == pytest.approx(scatter + replicas)
    assert cost.optimizer_s == pytest.approx(7e6 / 1e12)
    each = parameter_cost(MILLION, 500_000, group(shard=4, replicate=2), REQUEST,
                          each_micro_batch=True)
    assert each.reduce_each_s == pytest.approx(scatter)
    assert each.reduce_s == pytest.approx(replicas)


def test_what_replicas_copy() -> None:
    copying = replace(group(replicate=2), staging_s_per_byte=1e-10)
    plain = parameter_cost(MILLION, 0, group(replicate=2), REQUEST, each_micro_batch=False)
    cost = parameter_cost(MILLION, 0, copying, REQUEST, each_micro_batch=False)
    # Parameters in bf16 once; gradients in float32 into the message, and into the result.
    assert cost.gather_s == pytest.approx(2e6 * 1e-10)
    assert cost.reduce_s - plain.reduce_s == pytest.approx(2 * 4e6 * 1e-10)
    alone = replace(group(), staging_s_per_byte=1e-10)
    assert parameter_cost(MILLION, 0, alone, REQUEST, each_micro_batch=False).gather_s == 0


@pytest.mark.parametrize(("optimizer", "precision", "num_bytes"), [
    ("adamw", "bf16", 14), ("lion", "bf16-mixed", 20), ("sgd", "fp32", 12),
    ("sgd-momentum", "bf16", 10)])
def test_bytes_of_an_update(optimizer: str, precision: str, num_bytes: int) -> None:
    request = replace(REQUEST, optimizer=optimizer, precision=precision)  # type: ignore[arg-type]
    cost = parameter_cost(MILLION, 0, group(), request, each_micro_batch=False)
    assert cost.optimizer_s == pytest.approx(num_bytes * MILLION / 1e12)


def test_what_each_rank_of_a_group_holds_whole_is_summed_over_it() -> None:
    divided = layer_parameters(KIND, SHARD, group(tp=4), REQUEST, each_micro_batch=False)
    # norm: 1000 gradients in float32, twice 3/4 of them over each link; up has none to sum.
    assert divided.reduce_s == pytest.approx(2 * 4000 * 3 / 4 / 1e11)
    without = layer_parameters(KIND, replace(SHARD, sequence_parallel=False), group(tp=4),
                               REQUEST, each_micro_batch=False)
    assert without.reduce_s == 0
    tied = layer_parameters(KIND, SHARD, group(tp=4), REQUEST, each_micro_batch=False,
                            without=frozenset({"norm"}))
    assert tied.reduce_s == 0


def test_tensor_parallel_with_sequence_parallelism() -> None:
    forward, backward, again = tensor_parallel_seconds(
        KIND, Choice(), SHARD, span(4), per_token(500))
    # 128 tokens x 1000 elements gathered, twice 500 scattered, in bf16, 3/4 of it on each link.
    gathered, scattered = (128 * 1000 * 2 * 3 / 4 / 1e11, 128 * 1000 * 2 * 3 / 4 / 1e11)
    assert forward == pytest.approx(gathered + scattered)
    assert backward == pytest.approx(gathered + scattered)
    assert again == 0
    collectives = [tensor_parallel_seconds(KIND, Choice(recompute=mode), SHARD, span(4),
                                           per_token(500))[2]
                   for mode in ("selective", "full")]  # type: ignore[arg-type]
    assert collectives == pytest.approx([gathered, gathered + scattered])


def test_tensor_parallel_without_sequence_parallelism() -> None:
    plain = replace(SHARD, sequence_parallel=False)
    forward, backward, again = tensor_parallel_seconds(
        KIND, Choice(recompute="full"), plain, span(4), per_token(500))
    # Forward all-reduces what leaves, backward what entered; as many bytes here.
    assert forward == pytest.approx(2 * 128 * 1000 * 2 * 3 / 4 / 1e11)
    assert backward == pytest.approx(forward)
    assert again == forward


def test_a_layer_held_whole_gathers_the_sequence_and_no_more() -> None:
    whole = Choice(tensor_parallel=False)
    shard = replace(SHARD, tp=1)
    once = 128 * 500 * 2 * 3 / 4 / 1e11
    assert tensor_parallel_seconds(KIND, whole, shard, span(4), per_token(500)) == pytest.approx(
        (once, once, 0.0))
    plain = replace(shard, sequence_parallel=False)
    assert tensor_parallel_seconds(KIND, whole, plain, span(4), per_token(500)) == (0, 0, 0)


COMPUTE = ComputeTimes(forward_s=1.0, backward_s=2.0, recompute_selective_s=0.25,
                       recompute_full_s=1.0)
ONCE = ParameterCost(gather_s=0.4, reduce_s=0.0, reduce_each_s=0.0, optimizer_s=0.0, norm_s=0.0)
MEMORY = layer_memory(KIND, Choice(), SHARD, request=REQUEST, dp_shard=4,
                      unsharded_gradients=False)


def cost(choice: Choice = Choice(), *, once: ParameterCost = ONCE, slowdown: float = 1.0,  # noqa: B008
         num_micro_batches: int = 8, collectives: tuple[float, float, float] = (0.0, 0.0, 0.0)
         ) -> LayerCost:
    return layer_cost(choice, COMPUTE, collectives, once, MEMORY,
                      group(shard=4, slowdown=slowdown), num_micro_batches=num_micro_batches)


def test_gathers_hide_behind_compute_and_slow_it() -> None:
    hidden = cost()
    assert (hidden.forward_s, hidden.backward_s) == (1.0, 2.0)
    slowed = cost(slowdown=1.5)
    assert slowed.gather_forward_s == pytest.approx(0.2)
    assert slowed.gather_backward_s == pytest.approx(0.2)
    assert slowed.forward_s == pytest.approx(1.2)
    exposed = cost(once=replace(ONCE, gather_s=1.3))
    assert exposed.gather_forward_s == pytest.approx(0.3)
    assert exposed.gather_backward_s == 0


def test_kept_parameters_are_gathered_once_a_step() -> None:
    kept = cost(Choice(reshard=False), once=replace(ONCE, gather_s=1.8))
    assert kept.gather_forward_s == pytest.approx(0.8 / 8)
    assert kept.gather_backward_s == 0


@pytest.mark.parametrize(("mode", "again"), [("none", 0.0), ("selective", 0.25), ("full", 1.0)])
def test_recompute_adds_to_backward_what_it_repeats(mode: str, again: float) -> None:
    made = cost(Choice(recompute=mode), collectives=(0.5, 0.7, 0.1))  # type: ignore[arg-type]
    assert made.recompute_s == pytest.approx(again + 0.1)
    assert made.forward_s == pytest.approx(1.5)
    assert made.backward_s == pytest.approx(2.0 + 0.7 + again + 0.1)


def test_reductions_of_each_micro_batch_share_backward_with_gathers() -> None:
    # 3 s of reduction and 1 s of gather beside 2 s of backward: 2 s stick out, 3 parts of 4 of
    # them for the reduction.
    busy = cost(once=replace(ONCE, gather_s=1.0, reduce_each_s=3.0))
    assert busy.gather_backward_s == pytest.approx(0.5)
    assert busy.reduction_backward_s == pytest.approx(1.5)
    assert busy.backward_s == pytest.approx(4.0)


def test_the_last_reduction_hides_where_nothing_else_does() -> None:
    assert cost(Choice(reshard=False)).window_s == 2.0
    assert cost().window_s == pytest.approx(1.6)
    assert cost(Choice(recompute="full")).window_s == pytest.approx(2.6)
    assert cost(once=replace(ONCE, gather_s=5.0)).window_s == 0


def test_a_collective_waits_for_the_slowest_by_the_root_of_the_work_before_it() -> None:
    times = ComputeTimes(forward_s=4.0, backward_s=8.0, recompute_selective_s=0.5,
                         recompute_full_s=4.0)
    w = 0.01
    # 1 gather and 2 reduce-scatters forward, the same number backward
    assert tensor_parallel_waits(KIND, Choice(), SHARD, times, w) == pytest.approx(
        (3 * w * (4.0 / 3) ** 0.5, 3 * w * (8.0 / 3) ** 0.5, 0))
    again = [tensor_parallel_waits(KIND, Choice(recompute=mode), SHARD, times, w)[2]
             for mode in ("selective", "full")]  # type: ignore[arg-type]
    assert again == pytest.approx([w * 0.5 ** 0.5, w * (3 * 4.0) ** 0.5])
    plain = replace(SHARD, sequence_parallel=False)  # an all-reduce for each exit, each entry
    assert tensor_parallel_waits(KIND, Choice(), plain, times, w) == pytest.approx(
        (w * 8 ** 0.5, w * 8 ** 0.5, 0))
    assert tensor_parallel_waits(KIND, Choice(tensor_parallel=False), plain, times, w) == (0, 0, 0)
    assert tensor_parallel_waits(KIND, Choice(), SHARD, times, 0.0) == (0, 0, 0)


@pytest.mark.parametrize(("degrees", "reshard", "forward", "backward"), [
    ({"replicate": 2}, False, 0, 8.0 ** 0.5 / 2),              # one reduction, after the last
    ({"shard": 2}, False, 4.0 ** 0.5 / 2, 8.0 ** 0.5 / 2),     # one gather, before the first
    ({"shard": 2}, True, 4.0 ** 0.5, 4.0 ** 0.5 * (1 + 1 / 2)),
])
def test_data_parallel_ranks_wait_for_each_other(degrees: dict[str, int], reshard: bool,
                                                 forward: float, backward: float) -> None:
    compute = ComputeTimes(forward_s=4.0, backward_s=8.0, recompute_selective_s=0,
                           recompute_full_s=0)
    alone, waiting = group(**degrees), replace(group(**degrees), wait_s_per_root=0.1)
    found = [layer_times(Choice(reshard=reshard), compute, (0, 0, 0), parameter_cost(
        MILLION, 0, one, REQUEST, each_micro_batch=False), one, num_micro_batches=2)
        for one in (alone, waiting)]
    assert found[1].forward_s - found[0].forward_s == pytest.approx(0.1 * forward)
    assert found[1].backward_s - found[0].backward_s == pytest.approx(0.1 * backward)
