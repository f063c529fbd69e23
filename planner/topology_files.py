"""Topologies by name and from files.

`resolve` accepts what a person types or writes:

    dgx-h100                      one host of a preset (planner/topologies/*.json)
    dgx-h100:16                   sixteen of them
    dgx-a100-80g:2+dgx-h100:2     mixed kinds, in this order
    local, local:4                this machine (topology_local.py)
    cluster.json, cluster.yaml    a file: a whole Topology document, or the compact form

The compact form describes nodes; a preset is the same form for one node:

    name: my-cluster              # optional, as are description and network (of NetworkLevel)
    preset: dgx-h100              # optional: start from these figures, the rest overrides them
    nodes: 4
    gpus_per_node: 8
    device: h100-sxm-80g          # a shipped device, a Device document, or the file of one
    memory_bytes: 80000000000     # optional: instead of the device's
    intra_node: {bandwidth_bytes_per_s: 4.5e+11, latency_s: 2.0e-6, efficiency: 0.8}   # a Link
    inter_node: {bandwidth_bytes_per_s: 5.0e+10, latency_s: 5.0e-6}                    # one card
    cards_per_node: 8

For a mixed cluster, `hosts` is a list of such groups of nodes. Units are those of the records,
bytes and seconds; bandwidths are per direction.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from planner.topology import MAX_DEVICES, HostGroup, Link, NetworkLevel, Topology
from profiler.device import Device, load_device
from profiler.documents import STRICT, make, parse, read_data, read_shipped
from profiler.errors import InvalidInput, UnknownName
from profiler.limits import Ge, Gt, Le, MaxLen

__all__ = ["MAX_TOPOLOGY_BYTES", "PRESETS", "describe", "names", "resolve"]

PRESETS = Path(__file__).parent / "topologies"
SUFFIXES = (".json", ".yaml", ".yml")
MAX_TOPOLOGY_BYTES = 2**20
"""Largest topology file. An honest one of 256 groups, each with its own device, is below it, and a
mebibyte of YAML takes seconds to read: a larger limit would look like a hang."""

HINT = ("Or give a file (.json, .yaml), several joined by '+', or 'local'; "
        "`plan topologies` lists them.")


ALONE = "a single node: its network is never crossed"
LINK_KEYS = {"intra_node", "inter_node"}
WHOLE_KEYS = {"name", "description"}
GROUP_KEYS = {"preset", "nodes", "gpus_per_node", "device", "intra_node", "inter_node",
              "cards_per_node", "memory_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes in the compact form, after presets and device names were filled in."""

    __pydantic_config__: ClassVar = STRICT

    nodes: Annotated[int, Ge(1), Le(MAX_DEVICES)] = 1
    gpus_per_node: Annotated[int, Ge(1), Le(1024)]
    device: Device
    intra_node: Link
    inter_node: Link | None = None
    cards_per_node: Annotated[int, Ge(1), Le(1024)] = 1
    memory_bytes: Annotated[int, Gt(0), Le(2**50)] | None = None

    def host_group(self) -> HostGroup:
        """The group in the records of a Topology."""
        device = self.device
        if self.memory_bytes is not None:
            sources = device.sources | {"memory_bytes": "given with the topology"}
            device = replace(device, memory_bytes=self.memory_bytes, sources=sources)
        alone = replace(self.intra_node, source=ALONE)
        return HostGroup(count=self.nodes, devices_per_host=self.gpus_per_node, device=device,
                         device_link=self.intra_node, network_card=self.inter_node or alone,
                         cards_per_host=self.cards_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the compact form says about the whole."""

    __pydantic_config__: ClassVar = STRICT

    name: Annotated[str, MaxLen(200)] = ""
    description: Annotated[str, MaxLen(2000)] = ""
    network: Annotated[tuple[NetworkLevel, ...], MaxLen(4)] = ()


def names() -> tuple[str, ...]:
    """Names of the presets."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))


def describe(topology: str | Path | Topology) -> str:
    """One line: devices, memory, the link between them and the network of a host."""
    lines = []
    for group in resolve(topology).hosts:
        hosts = f"{group.count:,} hosts of " if group.count > 1 else ""
        bus = group.device_link.aggregate_bytes_per_s
        shared = f" ({bus / 1e9:g} together)" if bus else ""
        gigabits = group.network_card.bandwidth_bytes_per_s * 8 / 1e9
        lines.append(
            f"{hosts}{group.devices_per_host} x {group.device.name}, "
            f"{group.device.memory_bytes / 2**30:.1f} GiB each, "
            f"{group.device_link.bandwidth_bytes_per_s / 1e9:g} GB/s{shared} between them, "
            f"network {group.cards_per_host} x {gigabits:g} Gb/s")
    return "; ".join(lines)


def resolve(topology: str | Path | Topology) -> Topology:
    """The topology of a name, a file or itself.

    Raises:
        UnknownName: no preset of that name.
        InvalidInput: a malformed count, or a file that is not a topology.
    """
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, Path) or topology.endswith(SUFFIXES):
        return _from_file(Path(topology))
    text = topology.strip()
    parts = [_count(part, text) for part in text.split("+")]
    if any(name == "local" for name, _ in parts):
        return _local(parts)
    if len(parts) == 1:
        name, count = parts[0]
        return _from_compact({"preset": name, "nodes": count or 1}, text, text)
    groups = [{"preset": name, "nodes": count or 1} for name, count in parts]
    networks = [_preset(name).get("network", []) for name, _ in parts]
    if any(network != networks[0] for network in networks):
        raise InvalidInput(f"{text}: these presets have unequal networks; "
                           "write a file with `hosts` and `network`")
    return _from_compact({"hosts": groups, "network": networks[0]}, text, text)


def _count(part: str, text: str) -> tuple[str, int | None]:
    """Split `name:count`."""
    name, colon, count = part.strip().partition(":")
    if not name:
        raise InvalidInput(f"topology {text[:80]!r}: a name is missing; for example 'dgx-h100:2'")
    if not colon:
        return name, None
    if not re.fullmatch(r"[0-9]{1,9}", count) or not 1 <= int(count) <= MAX_DEVICES:
        raise InvalidInput(f"topology {text[:80]!r}: {count[:40]!r} is not a number of hosts; "
                           f"1 to {MAX_DEVICES:,} are possible, for example '{name[:40]}:2'")
    return name, int(count)


def _local(parts: list[tuple[str, int | None]]) -> Topology:
    from planner.topology_local import local_topology  # asks the machine, and torch if it is there

    if len(parts) > 1:
        raise InvalidInput("'local' is this one machine; it cannot be joined with others by '+'")
    return local_topology(parts[0][1])


@functools.cache
def _preset(name: str) -> dict[str, Any]:
    if name not in names():
        known = (*names(), "local")
        near = [preset for preset in known if name.lower() in preset]
        raise UnknownName("topology", name[:80], near or known, HINT)
    data: dict[str, Any] = read_shipped(PRESETS / f"{name}.json")
    return data


def _from_file(path: Path) -> Topology:
    if path.is_file() and path.stat().st_size > MAX_TOPOLOGY_BYTES:
        raise InvalidInput(f"{path}: {path.stat().st_size:,} bytes; a topology has at most "
                           f"{MAX_TOPOLOGY_BYTES:,}")
    data, where = read_data(path), str(path)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InvalidInput(f"{where}: a topology is a mapping, such as "
                           "{preset: dgx-h100, nodes: 4}")
    if "meshwright" in data:
        return parse(Topology, data, where)
    for group in (data, *(data["hosts"] if isinstance(data.get("hosts"), list) else ())):
        device = group.get("device") if isinstance(group, dict) else None
        if isinstance(device, str) and device.endswith(SUFFIXES):
            group["device"] = read_data(path.parent / device)
    return _from_compact(data, where, path.stem[:200])


def _from_compact(data: dict[str, Any], where: str, default_name: str) -> Topology:
    """A topology of the compact form."""
    data = dict(data)
    groups = data.pop("hosts", None)
    if groups is None:
        groups = [{key: data.pop(key) for key in list(data) if key in GROUP_KEYS}]
    elif misplaced := sorted(GROUP_KEYS & data.keys()):
        raise InvalidInput(f"{where}: {', '.join(misplaced)}: with `hosts`, each of the hosts says "
                           "this for itself")
    if not isinstance(groups, list) or not 1 <= len(groups) <= 256:
        raise InvalidInput(f"{where}: hosts: a list of 1 to 256 groups of nodes is needed")
    if not all(isinstance(group, dict) for group in groups):
        raise InvalidInput(f"{where}: hosts: each must be a mapping such as "
                           "{preset: dgx-h100, nodes: 4}")
    places = [f"{where}: hosts.{i}" if len(groups) > 1 else where for i in range(len(groups))]
    groups = [_inherit(group, place) for group, place in zip(groups, places, strict=True)]
    inherited = groups[0].get("network", []) if len(groups) == 1 else []
    cluster = make(Cluster, {"network": inherited} | data, where)
    hosts = [_node_group(group, place).host_group()
             for group, place in zip(groups, places, strict=True)]
    return _topology(cluster.name or default_name, hosts, cluster.network, where)


def _inherit(group: dict[str, Any], where: str) -> dict[str, Any]:
    """Lay a group over the preset that it names; links are overridden key by key."""
    if "preset" not in group:
        return group
    name = group["preset"]
    if not isinstance(name, str):
        raise InvalidInput(f"{where}: preset: a name is needed (got {str(name)[:60]!r})")
    merged = {key: value for key, value in _preset(name).items() if key not in WHOLE_KEYS}
    for key, value in group.items():
        if key in LINK_KEYS and isinstance(value, dict):
            link = merged.get(key, {})
            told = {"source": f"{link.get('source', '')} (changed: {', '.join(map(str, value))})"}
            merged[key] = link | told | value
        elif key != "preset":
            merged[key] = value
    return merged


def _node_group(data: dict[str, Any], where: str) -> NodeGroup:
    data = {key: value for key, value in data.items() if key != "network"}
    device = data.get("device")
    if isinstance(device, str):
        data["device"] = load_device(device)
    elif isinstance(device, dict):
        data["device"] = parse(Device, device, f"{where}: device")
    group = make(NodeGroup, data, where)
    if group.nodes > 1 and group.inter_node is None:
        raise InvalidInput(f"{where}: inter_node: missing; {group.nodes} nodes need the link that "
                           "joins them")
    return group


def _topology(name: str, hosts: list[HostGroup], network: tuple[NetworkLevel, ...],
              where: str) -> Topology:
    joined = sum(host.count for host in hosts) > 1
    alone = [i for i, host in enumerate(hosts) if joined and host.network_card.source == ALONE]
    if alone:
        raise InvalidInput(f"{where}: hosts.{alone[0]}: inter_node: missing; several hosts need "
                           "the link that joins them")
    return make(Topology, {"name": name, "hosts": hosts, "network": network}, where)
