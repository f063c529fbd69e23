"""A topology as a stack finds it: its devices and links with the constants fitted for the stack."""

from __future__ import annotations

from dataclasses import replace

from planner.stacks.record import Kernels, Stack, kernels_for
from planner.topology import HostGroup, Link, Topology

__all__ = ["equip", "equip_with"]


def equip(topology: Topology, stack: Stack) -> Topology:
    """The topology with the stack's constants; the same object where there are none."""
    groups = tuple(_group(group, kernels_for(stack, group.device.name, topology.num_hosts))
                   for group in topology.hosts)
    if all(a is b for a, b in zip(groups, topology.hosts, strict=True)):
        return topology
    return replace(topology, hosts=groups)


def equip_with(topology: Topology, kernels: Kernels) -> Topology:
    """The topology with given constants for all of its devices."""
    return replace(topology, hosts=tuple(_group(group, kernels) for group in topology.hosts))


def _group(group: HostGroup, kernels: Kernels) -> HostGroup:
    if kernels == Kernels():
        return group
    return replace(group, device=kernels.device(group.device),
                   device_link=_link(group.device_link, kernels.host_link_scale),
                   network_card=_link(group.network_card, kernels.network_scale))


def _link(link: Link, scale: float | None) -> Link:
    if scale is None:
        return link
    return replace(link, efficiency=min(1.0, link.efficiency * scale))
