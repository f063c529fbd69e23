"""The Topology: which devices there are and how they are linked.

A topology is a list of host groups (equal hosts together), each with its device kind, the links
between the devices of one host, and its network cards; hosts meet in a network of one or more
levels (`network[0]` joins hosts, `network[1]` joins groups of `network[0].hosts_per_group` hosts,
...). Without levels every host reaches every other at the speed of its cards.
Devices are numbered host by host in the order of the groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np

from profiler.device import Device
from profiler.documents import STRICT
from profiler.limits import Ge, Gt, Le, Len, MaxLen
from profiler.links import Links

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["HostGroup", "Link", "NetworkLevel", "Topology", "MAX_DEVICES"]

MAX_DEVICES = 131_072
"""Largest topology accepted; the largest published training run is below a third of it."""

RESERVED_NAMES = {"core", "device", "host"}
"""What the other nodes of `Topology.graph` are called."""

Name = Annotated[str, MaxLen(200)]
Bandwidth = Annotated[float, Gt(0), Le(1e15)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link, per direction.

    `latency_s`: of one step of a collective, or of one send.
    `start_s`: what a collective takes besides, however small it is: its kernel is launched, and its
    channels fill and drain.
    `efficiency`: the share of the nominal bandwidth that collectives reach.
    `aggregate_bytes_per_s`: where the links of one host meet in a common bus (PCIe), the most
    that all of them carry together, not scaled by `efficiency`; None for a non-blocking switch.
    """

    __pydantic_config__: ClassVar = STRICT

    bandwidth_bytes_per_s: Bandwidth
    latency_s: Annotated[float, Ge(0), Le(10)]
    start_s: Annotated[float, Ge(0), Le(10)] = 0.0
    efficiency: Annotated[float, Gt(0), Le(1)] = 1.0
    aggregate_bytes_per_s: Bandwidth | None = None
    source: Annotated[str, MaxLen(2000)] = ""

    @property
    def effective_bytes_per_s(self) -> float:
        return self.bandwidth_bytes_per_s * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """`count` equal hosts of `devices_per_host` devices.

    device_link: between any two devices of one host, per device.
    network_card, cards_per_host: what joins a host to the network; its devices share the cards.
    """

    __pydantic_config__: ClassVar = STRICT

    count: Annotated[int, Ge(1), Le(MAX_DEVICES)]
    devices_per_host: Annotated[int, Ge(1), Le(1024)]
    device: Device
    device_link: Link
    network_card: Link
    cards_per_host: Annotated[int, Ge(1), Le(1024)]

    @property
    def num_devices(self) -> int:
        return self.count * self.devices_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLevel:
    """A level of switches above `hosts_per_group` hosts each.

    uplink_bytes_per_s: what one group has to the level above, per direction; None if non-blocking.
    """

    __pydantic_config__: ClassVar = STRICT

    name: Name
    hosts_per_group: Annotated[int, Ge(1), Le(MAX_DEVICES)]
    uplink_bytes_per_s: Bandwidth | None = None
    latency_s: Annotated[float, Ge(0), Le(10)] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All the devices and links of a cluster.

    links: collectives measured on it, which are taken before the figures of the links.
    """

    __pydantic_config__: ClassVar = STRICT

    meshwright: Literal["Topology"] = "Topology"
    version: Literal[1] = 1
    name: Annotated[str, Len(1, 200)]
    hosts: Annotated[tuple[HostGroup, ...], Len(1, 256)]
    network: Annotated[tuple[NetworkLevel, ...], MaxLen(4)] = ()
    links: Links | None = None

    def __post_init__(self) -> None:
        if self.num_devices > MAX_DEVICES:
            raise ValueError(f"{self.num_devices:,} devices; at most {MAX_DEVICES:,}")
        sizes = [level.hosts_per_group for level in self.network]
        if any(b % a for a, b in pairwise(sizes)):
            raise ValueError(f"network: hosts_per_group {sizes}: each must divide the next")
        names = [level.name for level in self.network]
        if len(set(names)) < len(names) or RESERVED_NAMES & set(names):
            raise ValueError(f"network: names {names}: they must differ, and none may be "
                             f"{', '.join(sorted(RESERVED_NAMES))}")

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.hosts)

    @property
    def num_hosts(self) -> int:
        return sum(group.count for group in self.hosts)

    @property
    def is_uniform(self) -> bool:
        """Whether every host is like every other."""
        return len(self.hosts) == 1

    def group_of_device(self) -> np.ndarray:
        """Index into `hosts` of each device, shape (num_devices,)."""
        return np.repeat(np.arange(len(self.hosts)), [g.num_devices for g in self.hosts])

    def host_of_device(self) -> np.ndarray:
        """Host number of each device, shape (num_devices,)."""
        per_host = [g.devices_per_host for g in self.hosts for _ in range(g.count)]
        return np.repeat(np.arange(len(per_host)), per_host)

    def graph(self) -> nx.Graph:
        """Devices, hosts, switches and the links between them.

        Nodes are "device:0", "host:0", "<level>:0" and, where the top of the network has several
        switches, "core"; each has `kind`. Edges have `bandwidth_bytes_per_s` (per direction,
        after efficiency; None where non-blocking) and `latency_s`: half of what it is from end to
        end, so that the path between two devices adds up to it.
        """
        import networkx as nx  # 0.2 s that most commands can do without

        graph = nx.Graph(name=self.name)
        cards: list[tuple[float, float]] = []
        first = 0
        for group in self.hosts:
            link = group.device_link
            edge = {"kind": "device_link", "bandwidth_bytes_per_s": link.effective_bytes_per_s,
                    "latency_s": link.latency_s / 2}
            card = group.network_card
            for _ in range(group.count):
                host = f"host:{len(cards)}"
                last = first + group.devices_per_host
                devices = [f"device:{i}" for i in range(first, last)]
                graph.add_nodes_from(devices, kind="device", device=group.device.name)
                graph.add_node(host, kind="host", aggregate_bytes_per_s=link.aggregate_bytes_per_s)
                graph.add_edges_from(((device, host) for device in devices), **edge)
                cards.append((card.effective_bytes_per_s * group.cards_per_host, card.latency_s))
                first = last
        self._add_network(graph, cards)
        return graph

    def _add_network(self, graph: nx.Graph, cards: list[tuple[float, float]]) -> None:
        """Join the hosts by the switches of every level."""
        below = [f"host:{i}" for i in range(len(cards))]
        uplinks: list[tuple[float | None, float]] = list(cards)
        width = 1
        for level in self.network:
            switches = [f"{level.name}:{i}" for i in range(-(-len(cards) // level.hosts_per_group))]
            graph.add_nodes_from(switches, kind="switch")
            for i, (node, (bandwidth, latency_s)) in enumerate(zip(below, uplinks, strict=True)):
                graph.add_edge(node, switches[i * width // level.hosts_per_group], kind="network",
                               bandwidth_bytes_per_s=bandwidth,
                               latency_s=(latency_s + level.latency_s) / 2)
            below, width = switches, level.hosts_per_group
            uplinks = [(level.uplink_bytes_per_s, 0.0)] * len(switches)
        if len(below) > 1:
            graph.add_node("core", kind="switch")
            for node, (bandwidth, latency_s) in zip(below, uplinks, strict=True):
                graph.add_edge(node, "core", kind="network", bandwidth_bytes_per_s=bandwidth,
                               latency_s=latency_s / 2)
