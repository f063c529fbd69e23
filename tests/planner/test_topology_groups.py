"""Where groups lie: worked by hand on small clusters, and against a plain count of pairs."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from planner.topology import HostGroup, Link, NetworkLevel, Topology
from planner.topology_groups import Placement
from profiler.device import load_device
from profiler.errors import InvalidInput

NVLINK = Link(bandwidth_bytes_per_s=300e9, latency_s=2e-6, efficiency=0.8)
CARD = Link(bandwidth_bytes_per_s=25e9, latency_s=5e-6)


def hosts(count: int, **changes: object) -> HostGroup:
    group = HostGroup(count=count, devices_per_host=8, device=load_device("a100-80g"),
                      device_link=NVLINK, network_card=CARD, cards_per_host=8)
    return replace(group, **changes)  # type: ignore[arg-type]


def cluster(*groups: HostGroup, network: tuple[NetworkLevel, ...] = ()) -> Topology:
    return Topology(name="test", hosts=groups, network=network)


def test_tensor_parallel_inside_a_host() -> None:
    span = Placement(cluster(hosts(2))).span(8, 1)
    assert (span.size, span.num_groups, span.num_hosts) == (8, 2, 1)
    assert (span.members_per_host, span.max_members_per_host) == (8, 8)
    assert span.device_bytes_per_s == 240e9
    assert span.device_latency_s == 2e-6
    assert span.groups_per_host == 0
    assert span.network_bytes_per_s == inf
    assert span.network_latency_s == 0


def test_data_parallel_across_hosts_has_one_card_a_group() -> None:
    span = Placement(cluster(hosts(2))).span(2, 8)
    assert (span.size, span.num_groups, span.num_hosts, span.members_per_host) == (2, 8, 2, 1)
    assert span.groups_per_host == 8
    assert span.card_bytes_per_s == 25e9
    assert span.card_latency_s == 5e-6
    assert span.device_bytes_per_s == inf  # no two members share a host


def test_one_group_over_whole_hosts_has_all_cards() -> None:
    span = Placement(cluster(hosts(2))).span(16, 1)
    assert (span.num_groups, span.num_hosts, span.members_per_host) == (1, 2, 8)
    assert span.groups_per_host == 1
    assert span.card_bytes_per_s == 8 * 25e9
    assert span.device_bytes_per_s == 240e9


def test_a_lone_group_reaches_only_the_cards_of_its_members() -> None:
    placement = Placement(cluster(hosts(2)), np.array([0, 1, 8, 9]))
    assert placement.span(4, 1).card_bytes_per_s == 2 * 25e9
    assert placement.span(2, 2).card_bytes_per_s == 25e9


def test_few_cards_are_shared_and_many_are_bundled() -> None:
    four = Placement(cluster(hosts(2, cards_per_host=4)))
    assert four.span(2, 8).card_bytes_per_s == 4 * 25e9 / 8
    assert four.span(16, 1).card_bytes_per_s == 4 * 25e9
    many = Placement(cluster(hosts(2, cards_per_host=32)))
    assert many.span(2, 8).card_bytes_per_s == 4 * 25e9


def test_odd_degree_straddles_hosts() -> None:
    # groups 0-2, 3-5 | 6,7,8 | 9-11, 12-14: the third has two members in host 0, one in host 1
    span = Placement(cluster(hosts(2)), 15).span(3, 1)
    assert (span.num_groups, span.num_hosts) == (5, 2)
    assert (span.members_per_host, span.max_members_per_host) == (1, 3)
    assert span.groups_per_host == 1
    assert span.card_bytes_per_s == 25e9  # its one member in host 1 drives one card


def test_strided_odd_degree() -> None:
    # degree 3, stride 4 over 24 devices of 3 hosts: {0,4,8}: 2 + 1, {12,16,20}: 1 + 2
    span = Placement(cluster(hosts(3))).span(3, 4)
    assert (span.num_groups, span.num_hosts) == (8, 2)
    assert (span.members_per_host, span.max_members_per_host) == (1, 2)
    assert span.groups_per_host == 8  # host 1: four from below and four from above
    assert span.card_bytes_per_s == 25e9


def test_the_slowest_host_bounds_a_mixed_group() -> None:
    fast = hosts(1, device_link=replace(NVLINK, bandwidth_bytes_per_s=450e9),
                 network_card=replace(CARD, bandwidth_bytes_per_s=50e9, latency_s=4e-6))
    placement = Placement(cluster(hosts(1), fast))
    assert placement.span(8, 1).device_bytes_per_s == 240e9
    across = placement.span(2, 8)
    assert across.card_bytes_per_s == 25e9
    assert across.card_latency_s == 5e-6


def test_a_stage_on_fast_hosts_is_not_bound_by_the_others() -> None:
    fast = hosts(2, device_link=replace(NVLINK, bandwidth_bytes_per_s=450e9))
    placement = Placement(cluster(hosts(2), fast))
    assert placement.span(8, 1, stage=(2, 16, 0)).device_bytes_per_s == 240e9
    assert placement.span(8, 1, stage=(2, 16, 1)).device_bytes_per_s == 360e9
    assert placement.span(8, 1, stage=(2, 16, 1)).num_groups == 2


def test_a_common_bus_is_shared_by_the_devices_in_use() -> None:
    bus = Link(bandwidth_bytes_per_s=20e9, latency_s=8e-6, aggregate_bytes_per_s=40e9)
    box = cluster(hosts(1, device_link=bus))
    assert Placement(box).span(8, 1).device_bytes_per_s == 5e9
    assert Placement(box).span(4, 1).device_bytes_per_s == 5e9
    assert Placement(box, 2).span(2, 1).device_bytes_per_s == 20e9
    assert Placement(box, 4).span(4, 1).device_bytes_per_s == 10e9


def test_uplinks_are_shared_by_the_groups_that_leave() -> None:
    levels = (NetworkLevel(name="leaf", hosts_per_group=2, uplink_bytes_per_s=100e9,
                           latency_s=1e-6),
              NetworkLevel(name="spine", hosts_per_group=4, latency_s=3e-6))
    placement = Placement(cluster(hosts(4), network=levels))
    inside = placement.span(2, 8)  # two hosts of one leaf
    assert [level.name for level in inside.levels] == ["leaf"]
    assert inside.levels[0].uplink_bytes_per_s == inf
    assert inside.network_latency_s == pytest.approx(6e-6)
    across = placement.span(4, 8)
    assert (across.levels[0].num_switches, across.levels[0].members_per_switch) == (2, 2)
    assert across.levels[0].uplink_bytes_per_s == 100e9 / 8
    assert across.network_bytes_per_s == 12.5e9
    assert across.network_latency_s == pytest.approx(9e-6)


def test_pipeline_edges() -> None:
    placement = Placement(cluster(hosts(2)))
    inside = placement.pipeline_edge(4, degree=2)
    assert (inside.bytes_per_s, inside.latency_s, inside.same_host) == (240e9, 2e-6, True)
    across = placement.pipeline_edge(8)
    assert (across.bytes_per_s, across.latency_s, across.same_host) == (25e9, 5e-6, False)
    four = Placement(cluster(hosts(2)))
    assert four.pipeline_edge(4).same_host is False  # the worst of three
    assert four.pipeline_edge(4, index=0).same_host is True
    assert four.pipeline_edge(4, index=1).bytes_per_s == 25e9
    assert four.pipeline_edge(4, index=3, wrap=True).same_host is False
    with pytest.raises(InvalidInput, match="stage 3 sends nothing"):
        four.pipeline_edge(4, index=3)


def test_pipeline_edges_share_cards() -> None:
    shared = Placement(cluster(hosts(2, cards_per_host=2)))
    assert shared.pipeline_edge(8).bytes_per_s == 2 * 25e9 / 8
    assert shared.pipeline_edge(4, index=1).bytes_per_s == 2 * 25e9 / 4


def test_several_axes_together() -> None:
    placement = Placement(cluster(hosts(2)))
    assert placement.span_over(((2, 8), (8, 1))).size == 16
    merged = placement.span_over(((2, 8), (2, 2)))  # {0, 2, 8, 10}, ...
    assert (merged.size, merged.num_groups, merged.num_hosts) == (4, 4, 2)
    assert (merged.members_per_host, merged.groups_per_host) == (2, 4)
    assert merged.card_bytes_per_s == 2 * 25e9


def test_degree_one_uses_no_link() -> None:
    span = Placement(cluster(hosts(2))).span(1, 4)
    assert (span.size, span.num_hosts, span.members_per_host) == (1, 1, 1)
    assert span.device_bytes_per_s == span.network_bytes_per_s == inf
    assert Placement(cluster(hosts(2))).pipeline_edge(16).bytes_per_s == inf


@pytest.mark.parametrize("ranks", [0, 17, np.array([0, 0]), np.array([16]), np.array([-1])])
def test_ranks_that_are_not_there(ranks: object) -> None:
    with pytest.raises(InvalidInput):
        Placement(cluster(hosts(2)), ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(("degree", "stride"), [(3, 1), (0, 1), (8, 4), (2, 0)])
def test_an_axis_that_does_not_divide(degree: int, stride: int) -> None:
    with pytest.raises(InvalidInput, match="does not divide"):
        Placement(cluster(hosts(2))).span(degree, stride)


def test_against_a_plain_count() -> None:
    rng = np.random.default_rng(0)
    topology = cluster(hosts(3), hosts(2, devices_per_host=4), hosts(1, cards_per_host=2))
    host_of = topology.host_of_device()
    for _ in range(60):
        degree, stride, blocks = (int(x) for x in rng.integers(1, 5, size=3))
        num_ranks = degree * stride * blocks
        if num_ranks > topology.num_devices:
            continue
        devices = rng.permutation(topology.num_devices)[:num_ranks]
        groups = [[base + offset + i * stride for i in range(degree)]
                  for base in range(0, num_ranks, degree * stride) for offset in range(stride)]
        in_hosts = [[int(host_of[devices[rank]]) for rank in group] for group in groups]
        span = Placement(topology, devices).span(degree, stride)
        assert span.num_hosts == max(len(set(g)) for g in in_hosts)
        assert span.members_per_host == min(g.count(h) for g in in_hosts for h in g)
        assert span.max_members_per_host == max(g.count(h) for g in in_hosts for h in g)
        leaving = [h for g in in_hosts if len(set(g)) > 1 for h in set(g)]
        assert span.groups_per_host == max((leaving.count(h) for h in leaving), default=0)
