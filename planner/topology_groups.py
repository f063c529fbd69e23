"""Where process groups lie on a Topology: which links they cross and who shares them.

Ranks 0..n-1 are placed on devices (the first n of the topology, or any that the caller names). An
axis of `degree` d and `stride` q cuts the ranks into groups {r, r+q, ..., r+(d-1)q} inside blocks
of d*q ranks, and all the groups of an axis run their collective at the same time. A `Span` holds
what the cost of one such collective depends on, at the worst group: a collective is over when its
slowest group is.

How links are shared:

- Between devices of one host, each device has its link; where the host has a common bus
  (`aggregate_bytes_per_s`), the devices that use it have equal shares.
- Between hosts, the groups that leave a host have equal shares of its cards. A device drives the
  cards beside it and no others, cards/devices of them but at least one (a process on a DGX sends
  through the card of its own PCIe switch), so a group with k members in a host reaches at most k
  times that, however idle the rest is.
- Above hosts, the groups that leave a network group have equal shares of its uplink.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.link_fits import GroupFits, LinkTable
from planner.topology import Topology
from profiler.errors import InvalidInput

__all__ = ["Edge", "LevelSpan", "Placement", "Span"]

Axis = tuple[int, int]
"""(degree, stride)"""

Stage = tuple[int, int, int]
"""(degree, stride, index): the ranks whose coordinate on that axis is `index`."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSpan:
    """How the groups cross one level of the network.

    num_switches: most switches (groups of hosts) of this level under one process group.
    members_per_switch: most members of a process group under one switch.
    uplink_bytes_per_s: a process group's share of the uplink; inf if it needs none, or if the
        level is non-blocking.
    latency_s: of this level; 0 if no group reaches it.
    """

    name: str
    num_switches: int
    members_per_switch: int
    uplink_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The groups of one axis, at the worst of them in each figure; bandwidths are per direction.

    size: members of a group.
    num_groups: groups that were looked at.
    num_hosts: most hosts under one group.
    members_per_host, max_members_per_host: least and most members that a group has in a host.
    groups_per_host: most groups that touch one host and leave it: they share its cards.
    device_bytes_per_s: one device's link after efficiency and its share of a common bus; inf if no
        host holds two members of a group.
    card_bytes_per_s: one group's share of a host's cards, after efficiency; inf inside one host.
    start_s: what every collective of the group takes besides its steps.
    levels: of the network, from the hosts up.
    fits: measured collectives of such groups.
    """

    size: int
    num_groups: int
    num_hosts: int
    members_per_host: int
    max_members_per_host: int
    groups_per_host: int
    device_bytes_per_s: float
    device_latency_s: float
    card_bytes_per_s: float
    card_latency_s: float
    start_s: float = 0.0
    levels: tuple[LevelSpan, ...] = ()
    fits: GroupFits | None = None

    @property
    def network_bytes_per_s(self) -> float:
        """What one group has between hosts: its cards or an uplink, whichever is less."""
        return min([self.card_bytes_per_s, *(level.uplink_bytes_per_s for level in self.levels)])

    @property
    def network_latency_s(self) -> float:
        """From host to host: the card and every level of switches on the way."""
        return self.card_latency_s + sum(level.latency_s for level in self.levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The worst link from a pipeline stage to the next, while every rank of it sends at once."""

    bytes_per_s: float
    latency_s: float
    same_host: bool
    fits: GroupFits | None = None


class _Runs(NamedTuple):
    """Members of one group in one place (host or switch): parallel arrays, a row each."""

    group: Ints
    place: Ints
    length: Ints


class _Hosts(NamedTuple):
    """Figures of each host, by host number."""

    device_bytes_per_s: Floats
    device_latency_s: Floats
    start_s: Floats
    bus_bytes_per_s: Floats
    cards_bytes_per_s: Floats
    reach_bytes_per_s: Floats
    card_latency_s: Floats


class Placement:
    """Ranks on the devices of a topology; `span` and `pipeline_edge` remember their answers."""

    def __init__(self, topology: Topology, ranks: int | Ints | None = None,
                 links: LinkTable | None = None) -> None:
        """`ranks`: how many of the first devices, or the device of each rank; None for all.
        `links`: the topology's own, if they have been looked up before.

        Raises:
            InvalidInput: more ranks than devices, a device that is not there or given twice.
        """
        self.topology = topology
        self.device_of_rank = _devices(topology, ranks)
        self.num_ranks = len(self.device_of_rank)
        self.host_of_rank: Ints = topology.host_of_device()[self.device_of_rank]
        self._ordered = bool(np.all(np.diff(self.host_of_rank) >= 0))
        self._hosts = _host_figures(topology)
        if links is None and topology.links is not None:
            links = LinkTable(topology.links)
        self._links = links
        self._spans: dict[tuple[tuple[Axis, ...], Stage | None], Span] = {}
        self._edges: dict[tuple[int, int, int | None, bool], Edge] = {}

    def span(self, degree: int, stride: int = 1, *, stage: Stage | None = None) -> Span:
        """The groups of one axis.

        stage: look only at the groups of one pipeline stage, (degree, stride, index) of the
            pipeline axis; the groups of the others share the links all the same.
        """
        return self.span_over(((degree, stride),), stage=stage)

    def span_over(self, axes: tuple[Axis, ...], *, stage: Stage | None = None) -> Span:
        """The groups over several axes together, which need not be neighbours in the mesh."""
        key = (axes, stage)
        if key not in self._spans:
            self._spans[key] = self._measure(axes, stage)
        return self._spans[key]

    def pipeline_edge(self, stride: int, *, degree: int | None = None, index: int | None = None,
                      wrap: bool = False) -> Edge:
        """From rank r to r+stride, for point-to-point sends to the next pipeline stage.

        degree: of the pipeline axis; None if it is the outermost axis.
        index: only the sends of this stage; None for the worst stage.
        wrap: the last stage sends to the first as well (interleaved schedules).

        All the sends of one direction happen at once and share the cards; those of the other
        direction do not take from them, links being full duplex.
        """
        degree = self.num_ranks // max(stride, 1) if degree is None else degree
        key = (stride, degree, index, wrap)
        if key not in self._edges:
            self._edges[key] = self._measure_edge(stride, degree, index, wrap)
        return self._edges[key]

    def _groups(self, values: Ints, axes: tuple[Axis, ...]) -> Ints:
        """`values` of the ranks, a row for each group of `axes`."""
        shape: list[int] = []
        member_dims: list[int] = []
        block = self.num_ranks
        for degree, stride in sorted(axes, key=lambda axis: -axis[1]):
            if degree < 1 or stride < 1 or block % (degree * stride):
                raise InvalidInput(f"an axis of degree {degree} and stride {stride} does not "
                                   f"divide blocks of {block} ranks (of {self.num_ranks})")
            member_dims.append(len(shape) + 1)
            shape += [block // (degree * stride), degree]
            block = stride
        shape.append(block)
        group_dims = [dim for dim in range(len(shape)) if dim not in member_dims]
        table = values.reshape(shape).transpose(group_dims + member_dims)
        return table.reshape(-1, prod(degree for degree, _ in axes))

    def _measure(self, axes: tuple[Axis, ...], stage: Stage | None) -> Span:
        table = self._groups(self.host_of_rank, axes)
        if len(axes) > 1 or not self._ordered:
            table = np.sort(table, axis=1)
        num_groups, size = table.shape
        chosen = np.ones(num_groups, dtype=bool)
        if stage is not None:
            first = self._groups(np.arange(self.num_ranks), axes)[:, 0]
            chosen = _on_stage(first, stage)
            if not chosen.any():
                raise InvalidInput(f"no group of {axes} lies on stage {stage}")

        runs = _runs(table)
        here = chosen[runs.group]
        spread, leaving = _crossing(runs)
        pairs = runs.length > 1
        device_bytes_per_s, device_latency_s = self._device_links(runs, pairs, here)
        crossing = here & (spread > 1)
        hosts, length = runs.place[crossing], runs.length[crossing]
        share = np.minimum(self._hosts.cards_bytes_per_s[hosts] / leaving[hosts],
                           self._hosts.reach_bytes_per_s[hosts] * length)
        return Span(
            size=size,
            num_groups=int(chosen.sum()),
            num_hosts=int(spread[here].max()),
            members_per_host=int(runs.length[here].min()),
            max_members_per_host=int(runs.length[here].max()),
            groups_per_host=int(leaving[hosts].max(initial=0)),
            device_bytes_per_s=device_bytes_per_s,
            device_latency_s=device_latency_s,
            card_bytes_per_s=float(share.min(initial=inf)),
            card_latency_s=float(self._hosts.card_latency_s[hosts].max(initial=0.0)),
            start_s=float(self._hosts.start_s[runs.place[here]].max()) if size > 1 else 0.0,
            levels=self._levels(table, chosen) if len(hosts) else (),
            fits=self._fits(size, runs, here),
        )

    def _fits(self, size: int, runs: _Runs, here: NDArray[np.bool_]) -> GroupFits | None:
        """What was measured of such groups, if they have equally many members on each host."""
        if self._links is None or size == 1 or len(set(runs.length[here].tolist())) > 1:
            return None
        touching = np.bincount(runs.place)
        return self._links.of(size, size // int(runs.length[here][0]),
                              int(touching[runs.place[here]].max()))

    def _device_links(self, runs: _Runs, pairs: NDArray[np.bool_],
                      here: NDArray[np.bool_]) -> tuple[float, float]:
        """Bandwidth and latency between members in one host, at the worst host."""
        users = np.bincount(runs.place[pairs], weights=runs.length[pairs])
        hosts = runs.place[pairs & here]
        bandwidth = np.minimum(self._hosts.device_bytes_per_s[hosts],
                               self._hosts.bus_bytes_per_s[hosts] / users[hosts])
        latency = self._hosts.device_latency_s[hosts]
        return float(bandwidth.min(initial=inf)), float(latency.max(initial=0.0))

    def _levels(self, hosts: Ints, chosen: NDArray[np.bool_]) -> tuple[LevelSpan, ...]:
        spans = []
        reached = True  # the level below could not hold every group
        for level in self.topology.network:
            if not reached:
                break
            runs = _runs(hosts // level.hosts_per_group)
            here = chosen[runs.group]
            spread, leaving = _crossing(runs)
            crossing = here & (spread > 1)
            uplink = inf if level.uplink_bytes_per_s is None else level.uplink_bytes_per_s
            spans.append(LevelSpan(
                name=level.name,
                num_switches=int(spread[here].max()),
                members_per_switch=int(runs.length[here].max()),
                uplink_bytes_per_s=uplink / float(leaving[runs.place[crossing]].max(initial=0) or 1)
                if crossing.any() else inf,
                latency_s=level.latency_s,
            ))
            reached = bool(crossing.any())
        return tuple(spans)

    def _measure_edge(self, stride: int, degree: int, index: int | None, wrap: bool) -> Edge:
        table = self._groups(self.host_of_rank, ((degree, stride),))
        if degree == 1:
            return Edge(bytes_per_s=inf, latency_s=0.0, same_host=True)
        sender = np.arange(degree if wrap else degree - 1)
        source = table[:, sender].ravel()
        target = table[:, (sender + 1) % degree].ravel()
        chosen = np.ones(len(source), dtype=bool)
        if index is not None:
            chosen = np.tile(sender == index, len(table))
        if not chosen.any():
            raise InvalidInput(f"stage {index} sends nothing on; stages 0 to {len(sender) - 1} do")
        inside = source == target
        bandwidth = np.full(len(source), inf)
        latency = np.zeros(len(source))
        self._inside_edges(source, inside, bandwidth, latency)
        self._outside_edges(source, target, ~inside, bandwidth, latency)
        same_host = bool(inside[chosen].all())
        fits = None
        if self._links is not None:
            # The stages send one after the other: at once are the sends of one stage.
            at_once = -(-int(np.bincount(source).max()) // len(sender))
            fits = self._links.of(2, 1 if same_host else 2, at_once)
        return Edge(bytes_per_s=float(bandwidth[chosen].min()),
                    latency_s=float(latency[chosen].max()), same_host=same_host, fits=fits)

    def _inside_edges(self, source: Ints, inside: NDArray[np.bool_], bandwidth: Floats,
                      latency: Floats) -> None:
        host = source[inside]
        users = np.bincount(host, minlength=self.topology.num_hosts)
        bandwidth[inside] = np.minimum(self._hosts.device_bytes_per_s[host],
                                       self._hosts.bus_bytes_per_s[host] / users[host])
        latency[inside] = self._hosts.device_latency_s[host]

    def _outside_edges(self, source: Ints, target: Ints, outside: NDArray[np.bool_],
                       bandwidth: Floats, latency: Floats) -> None:
        figures = self._hosts
        ends = source[outside], target[outside]
        num_hosts = self.topology.num_hosts
        for host in ends:  # sending cards, then receiving cards
            users = np.bincount(host, minlength=num_hosts)
            share = np.minimum(figures.cards_bytes_per_s[host] / users[host],
                               figures.reach_bytes_per_s[host])
            bandwidth[outside] = np.minimum(bandwidth[outside], share)
        latency[outside] = np.maximum(*(figures.card_latency_s[host] for host in ends))
        reached = np.ones(len(ends[0]), dtype=bool)
        for level in self.topology.network:
            latency[outside] += np.where(reached, level.latency_s, 0.0)
            switches = [host // level.hosts_per_group for host in ends]
            reached = switches[0] != switches[1]
            if level.uplink_bytes_per_s is None:
                continue
            for switch in switches:
                users = np.bincount(switch[reached], minlength=num_hosts)
                share = np.where(reached, level.uplink_bytes_per_s / np.maximum(users[switch], 1),
                                 inf)
                bandwidth[outside] = np.minimum(bandwidth[outside], share)


def _devices(topology: Topology, ranks: int | Ints | None) -> Ints:
    have = topology.num_devices
    if ranks is None or isinstance(ranks, (int, np.integer)):
        count = have if ranks is None else int(ranks)
        if not 1 <= count <= have:
            raise InvalidInput(f"{count:,} ranks on {topology.name}: it has 1 to {have:,} devices")
        return np.arange(count)
    devices = np.asarray(ranks, dtype=np.int64)
    if devices.ndim != 1 or not devices.size:
        raise InvalidInput(f"devices of ranks: shape {devices.shape}; a list of them is needed")
    if devices.min() < 0 or devices.max() >= have:
        raise InvalidInput(f"devices of ranks: {devices.min()} to {devices.max()}; "
                           f"{topology.name} has 0 to {have - 1}")
    used, times = np.unique(devices, return_counts=True)
    if (times > 1).any():
        raise InvalidInput(f"devices of ranks: device {used[times > 1][0]} is given twice")
    return devices


def _host_figures(topology: Topology) -> _Hosts:
    rows = []
    for group in topology.hosts:
        card = group.network_card.effective_bytes_per_s
        rows.append((
            group.device_link.effective_bytes_per_s,
            group.device_link.latency_s,
            group.device_link.start_s,
            group.device_link.aggregate_bytes_per_s or inf,
            min(card * group.cards_per_host, group.network_card.aggregate_bytes_per_s or inf),
            card * max(1.0, group.cards_per_host / group.devices_per_host),
            group.network_card.latency_s,
        ))
    counts = [group.count for group in topology.hosts]
    return _Hosts(*(np.repeat(np.array(column), counts) for column in zip(*rows, strict=True)))


def _runs(table: Ints) -> _Runs:
    """The runs of equal places in the (sorted) rows of `table`."""
    size = table.shape[1]
    flat = table.ravel()
    first = np.ones(flat.size, dtype=bool)
    first[1:] = flat[1:] != flat[:-1]
    first[::size] = True
    starts = np.flatnonzero(first)
    length = np.diff(starts, append=flat.size)
    return _Runs(group=starts // size, place=flat[starts], length=length)


def _crossing(runs: _Runs) -> tuple[Ints, Ints]:
    """For each run, over how many places its group lies; for each place, how many groups leave."""
    spread = np.bincount(runs.group)[runs.group]
    outward = runs.place[spread > 1]
    return spread, np.bincount(outward, minlength=int(runs.place.max()) + 1)


def _on_stage(first_rank: Ints, stage: Stage) -> NDArray[np.bool_]:
    degree, stride, index = stage
    on_stage: NDArray[np.bool_] = (first_rank // stride) % degree == index
    return on_stage
