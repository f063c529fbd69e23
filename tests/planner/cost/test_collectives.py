"""Collectives: each form worked by hand, and what must hold for all of them."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from planner.topology_groups import Edge, LevelSpan, Span

MB = 10**6


def span(hosts: int, per_host: int, **changes: object) -> Span:
    """Groups over whole hosts: 100 GB/s and 2 us inside, 25 GB/s and 5 us between."""
    made = Span(
        size=hosts * per_host, num_groups=1, num_hosts=hosts, members_per_host=per_host,
        max_members_per_host=per_host, groups_per_host=1,
        device_bytes_per_s=1e11 if per_host > 1 else inf, device_latency_s=2e-6,
        card_bytes_per_s=2.5e10 if hosts > 1 else inf, card_latency_s=5e-6 if hosts > 1 else 0.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_ring_in_one_host() -> None:
    # 800 MB, of which 3/4 pass each link at 100 GB/s: 6 ms, and 3 steps of 2 us.
    assert all_gather_seconds(800 * MB, span(1, 4)) == pytest.approx(6e-3 + 6e-6)


def test_a_collective_starts_once() -> None:
    """40 us and 14 steps of 3.9 us: what nccl-tests show of small all-reduces on 8 A100."""
    group = span(1, 8, device_latency_s=3.9e-6, start_s=4e-5)
    assert all_reduce_seconds(8, group) == pytest.approx(94.6e-6, rel=1e-3)
    assert all_gather_seconds(8, group) == pytest.approx(67.3e-6, rel=1e-3)


def test_ring_over_hosts_is_as_fast_as_its_slowest_link() -> None:
    # 7/8 of 800 MB at 25 GB/s: 28 ms; of the 8 steps 6 are inside a host and 2 between.
    assert all_gather_seconds(800 * MB, span(2, 4)) == pytest.approx(28e-3 + 6 * 2e-6 + 2 * 5e-6)
    # Where links are slower than the network, they bind.
    slow = span(2, 4, device_bytes_per_s=1e10)
    assert all_gather_seconds(800 * MB, slow) == pytest.approx(70e-3 + 22e-6)


def test_one_member_a_host_needs_no_link() -> None:
    assert all_gather_seconds(800 * MB, span(4, 1)) == pytest.approx(24e-3 + 4 * 5e-6)


def test_all_reduce_in_one_host_is_scatter_and_gather() -> None:
    assert all_reduce_seconds(800 * MB, span(1, 4)) == pytest.approx(2 * (6e-3 + 6e-6))


def test_all_reduce_over_hosts_is_hierarchical_where_large() -> None:
    # Both ways: 3/4 of 800 MB at 100 GB/s inside, 1/2 of it at 25 GB/s between; the ring takes
    # 56 ms and the tree 64 ms.
    by_hand = 2 * (6e-3 + 3 * 2e-6 + 16e-3 + 5e-6)
    assert all_reduce_seconds(800 * MB, span(2, 4)) == pytest.approx(by_hand)


def test_all_reduce_over_many_hosts_is_a_tree_where_small() -> None:
    # 16 hosts: 4 levels of the tree up and down, 7 steps in the host twice.
    by_hand = 2 * 4 / 2.5e10 + 2 * 7 * 2e-6 + 2 * 4 * 5e-6
    assert all_reduce_seconds(4, span(16, 8)) == pytest.approx(by_hand)


def test_unequal_members_have_no_hierarchy() -> None:
    uneven = span(2, 4, size=7, members_per_host=3)
    ring = 2 * (800 * MB * 6 / 7 / 2.5e10 + 5 * 2e-6 + 2 * 5e-6)
    assert all_reduce_seconds(800 * MB, uneven) == pytest.approx(ring)


def test_an_uplink_binds_and_adds_its_latency() -> None:
    level = LevelSpan(name="spine", num_switches=2, members_per_switch=4, uplink_bytes_per_s=5e9,
                      latency_s=1e-6)
    over = span(2, 4, levels=(level,))
    assert all_gather_seconds(800 * MB, over) == pytest.approx(0.14 + 6 * 2e-6 + 2 * 6e-6)


def test_nothing_to_do_takes_no_time() -> None:
    for collective in (all_gather_seconds, reduce_scatter_seconds, all_reduce_seconds):
        assert collective(800 * MB, span(1, 1)) == 0
        assert collective(0, span(2, 4)) == 0
    assert send_seconds(0, Edge(bytes_per_s=1e10, latency_s=5e-6, same_host=False)) == 0


def test_send() -> None:
    edge = Edge(bytes_per_s=2e10, latency_s=5e-6, same_host=False)
    assert send_seconds(10 * MB, edge) == pytest.approx(5e-4 + 5e-6)


SPANS = st.builds(span, st.integers(1, 32), st.integers(1, 16),
                  device_latency_s=st.floats(0, 1e-4), card_latency_s=st.floats(0, 1e-4))
SIZES = st.floats(0, 1e12)


@given(SIZES, SIZES, SPANS)
def test_more_bytes_take_no_less_time(a: float, b: float, group: Span) -> None:
    less, more = sorted((a, b))
    for collective in (all_gather_seconds, reduce_scatter_seconds, all_reduce_seconds):
        assert collective(less, group) <= collective(more, group) * (1 + 1e-12)


@given(SIZES, SPANS)
def test_forms_agree(num_bytes: float, group: Span) -> None:
    gather, scatter = (all_gather_seconds(num_bytes, group),
                       reduce_scatter_seconds(num_bytes, group))
    assert gather == scatter
    assert all_reduce_seconds(num_bytes, group) <= gather + scatter


@given(st.floats(1, 1e12), SPANS, st.floats(1, 100))
def test_faster_links_take_no_more_time(num_bytes: float, group: Span, faster: float) -> None:
    better = replace(group, device_bytes_per_s=group.device_bytes_per_s * faster,
                     card_bytes_per_s=group.card_bytes_per_s * faster)
    for collective in (all_gather_seconds, all_reduce_seconds):
        assert collective(num_bytes, better) <= collective(num_bytes, group) * (1 + 1e-12)
