"""The records of a topology: what they refuse, how devices are numbered, and the graph."""

from __future__ import annotations

import networkx as nx
import pytest
from pydantic import ValidationError

from planner.topology import NetworkLevel, Topology
from planner.topology_files import names, resolve
from profiler.documents import digest, dump, parse, to_data
from profiler.errors import InvalidInput


@pytest.mark.parametrize("name", names())
def test_round_trip(name: str) -> None:
    topology = resolve(f"{name}:3")
    assert parse(Topology, to_data(topology), name) == topology
    assert digest(parse(Topology, to_data(topology), name)) == digest(topology)
    assert '"meshwright": "Topology"' in dump(topology)


def test_devices_are_numbered_host_by_host() -> None:
    topology = resolve("dgx-a100-80g:2+ethernet-25g:1")
    assert topology.num_hosts == 3
    assert topology.num_devices == 20
    assert list(topology.host_of_device()) == [0] * 8 + [1] * 8 + [2] * 4
    assert list(topology.group_of_device()) == [0] * 16 + [1] * 4
    assert not topology.is_uniform


def _level(name: str, hosts_per_group: int) -> NetworkLevel:
    return NetworkLevel(name=name, hosts_per_group=hosts_per_group)


@pytest.mark.parametrize("network", [
    (_level("leaf", 4), _level("spine", 6)),  # 6 hosts are not whole leaves
    (_level("leaf", 2), _level("leaf", 4)),
    (_level("host", 2),),
])
def test_networks_that_make_no_sense(network: tuple[NetworkLevel, ...]) -> None:
    with pytest.raises(ValueError, match="network"):
        Topology(name="x", hosts=resolve("dgx-h100:8").hosts, network=network)


def test_unknown_keys_are_refused() -> None:
    data = to_data(resolve("dgx-h100")) | {"hostz": 1}
    with pytest.raises(InvalidInput, match="hostz: unknown key"):
        parse(Topology, data, "x")


def test_graph_of_one_host() -> None:
    graph = resolve("dgx-h100").graph()
    assert sorted(graph["host:0"]) == sorted(f"device:{i}" for i in range(8))
    path = nx.shortest_path(graph, "device:0", "device:5")
    assert path == ["device:0", "host:0", "device:5"]
    assert nx.path_weight(graph, path, "latency_s") == pytest.approx(1.9e-6)
    assert graph["device:0"]["host:0"]["bandwidth_bytes_per_s"] == pytest.approx(369e9)


def test_graph_of_levels_adds_up_latencies() -> None:
    levels = (NetworkLevel(name="leaf", hosts_per_group=2, uplink_bytes_per_s=1e11, latency_s=1e-6),
              NetworkLevel(name="spine", hosts_per_group=4, latency_s=3e-6))
    topology = Topology(name="x", hosts=resolve("dgx-h100:8").hosts, network=levels)
    graph = topology.graph()
    assert sum(kind == "switch" for _, kind in graph.nodes(data="kind")) == 4 + 2 + 1
    near = nx.shortest_path(graph, "host:0", "host:1")
    assert near == ["host:0", "leaf:0", "host:1"]
    assert nx.path_weight(graph, near, "latency_s") == pytest.approx(5e-6)
    far = nx.shortest_path(graph, "host:0", "host:2")
    assert far == ["host:0", "leaf:0", "spine:0", "leaf:1", "host:2"]
    assert nx.path_weight(graph, far, "latency_s") == pytest.approx(8e-6)
    assert graph["leaf:0"]["spine:0"]["bandwidth_bytes_per_s"] == 1e11
    assert graph["spine:0"]["core"]["bandwidth_bytes_per_s"] is None


@pytest.mark.parametrize("text", ["dgx-a100-80g:2+dgx-h100:3", "gb200-nvl72", "dgx-h100:64"])
def test_graph_is_one_tree(text: str) -> None:
    topology = resolve(text)
    graph = topology.graph()
    assert nx.is_tree(graph)
    kinds = [kind for _, kind in graph.nodes(data="kind")]
    assert kinds.count("device") == topology.num_devices
    assert kinds.count("host") == topology.num_hosts


def test_too_many_devices() -> None:
    with pytest.raises((ValueError, ValidationError), match="at most 131,072"):
        Topology(name="x", hosts=(resolve("dgx-h100:16384").hosts[0],) * 2)
