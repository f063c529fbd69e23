"""The Topology: which devices there are and how they are linked.

A topology is a list of host groups (equal hosts together), each with its device kind, the links between
the devices of one host, and its network cards; hosts meet in a network of one or more levels
(`network[0]` joins hosts, `network[1]` joins groups of `network[0].hosts_per_group` hosts, ...).
Devices are numbered host by host in the order of the groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import networkx as nx
import numpy as np
from annotated_types import Ge, Gt, Le, Len, MaxLen
from pydantic import ConfigDict

from profiler.device import Device
from profiler.documents import STRICT

__all__ = ["HostGroup", "Link", "NetworkLevel", "Topology", "MAX_DEVICES"]

MAX_DEVICES = 131_072
"""Largest topology accepted; the largest published training run is below a third of it."""

Name = Annotated[str, MaxLen(200)]
Bandwidth = Annotated[float, Gt(0), Le(1e15)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link, per direction. `efficiency` is the share of the nominal bandwidth that collectives reach.

    `aggregate_bytes_per_s`: where the links of one host meet in a common bus (PCIe), the most
    that all of them carry together; None for a non-blocking switch.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    bandwidth_bytes_per_s: Bandwidth
    latency_s: Annotated[float, Ge(0), Le(10)]
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

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

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

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Name
    hosts_per_group: Annotated[int, Ge(1), Le(MAX_DEVICES)]
    uplink_bytes_per_s: Bandwidth | None = None
    latency_s: Annotated[float, Ge(0), Le(10)] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All the devices and links of a cluster."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    meshwright: Literal["Topology"] = "Topology"
    version: Literal[1] = 1
    name: Annotated[str, Len(1, 200)]
    hosts: Annotated[tuple[HostGroup, ...], Len(1, 256)]
    network: Annotated[tuple[NetworkLevel, ...], MaxLen(4)] = ()

    def __post_init__(self) -> None:
        if self.num_devices > MAX_DEVICES:
            raise ValueError(f"{self.num_devices:,} devices; at most {MAX_DEVICES:,}")
        sizes = [level.hosts_per_group for level in self.network]
        if any(b % a for a, b in zip(sizes, sizes[1:], strict=False)):
            raise ValueError(f"network: hosts_per_group {sizes}: each must divide the next")

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
