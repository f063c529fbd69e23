"""Which measured collective stands for which groups of a mesh.

A fit is used for groups of its size, spread over as many hosts, with as many of them at once on a
host; if that many were not measured, the next larger number is. Groups of any other shape are
priced analytically.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from profiler.documents import load
from profiler.errors import InvalidInput
from profiler.links import Collective, LinkFit, Links

__all__ = ["GroupFits", "LinkTable", "with_links"]


if TYPE_CHECKING:
    from planner.topology import Topology


def with_links(topology: Topology, links: Links | str | Path) -> Topology:
    """A topology with measured collectives and, if it was measured, the slow-down of compute.

    Raises:
        InvalidInput: not a Links document, or of another backend than the devices'.
    """
    where = "links" if isinstance(links, Links) else str(links)
    if not isinstance(links, Links):
        links = load(Links, links)
    wrong = sorted({f"{where}: measured over {links.backend}, and {group.device.name} communicates "
                    f"over {group.device.backend}" for group in topology.hosts
                    if group.device.backend != links.backend})
    if wrong:
        raise InvalidInput(wrong)
    # Over gloo FSDP2 waits for every collective, whatever the machine could do beside one.
    names = ("overlap_slowdown", "communicator_bytes")[links.backend == "gloo":]
    found = {name: value for name in names
             if (value := getattr(links, name)) is not None}
    sources = dict.fromkeys(found, f"measured: {links.hardware}, {links.date}")
    hosts = tuple(replace(group, device=replace(
        group.device, **found, sources=group.device.sources | sources))
        for group in topology.hosts)
    return replace(topology, hosts=hosts, links=links)


@dataclass(frozen=True, slots=True, eq=False)
class GroupFits:
    """The measured collectives of groups of one shape, one object for equal shapes.

    is_ideal: the least of any shape of this size, for bounds: the analytic form may be less still.
    """

    fits: dict[Collective, tuple[LinkFit, ...]]
    is_ideal: bool = False

    def seconds(self, collective: Collective, num_bytes: float) -> float | None:
        """Measured seconds, or None where this collective was not measured."""
        found = self.fits.get(collective)
        return min(fit.expected_seconds(num_bytes) for fit in found) if found else None

    def or_analytic(self, collective: Collective, num_bytes: float, analytic_s: float) -> float:
        """Measured seconds if there are any; of an ideal, the lesser of both."""
        measured = self.seconds(collective, num_bytes)
        if measured is None:
            return analytic_s
        return min(measured, analytic_s) if self.is_ideal else measured

    def source(self, collective: Collective, num_bytes: float
               ) -> Literal["measured", "extrapolated", "analytic"]:
        """How `or_analytic` obtains its seconds."""
        found = self.fits.get(collective)
        if not found:
            return "analytic"
        return "measured" if all(f.is_measured(num_bytes) for f in found) else "extrapolated"


class LinkTable:
    """The fits of a Links document by shape."""

    def __init__(self, links: Links) -> None:
        self._fits: dict[tuple[Collective, int, int], dict[int, LinkFit]] = {}
        for fit in links.fits:
            shape = (fit.collective, fit.group_size, fit.num_hosts)
            self._fits.setdefault(shape, {})[fit.groups_at_once] = fit
        self._of: dict[tuple[int, int, int], GroupFits | None] = {}
        self._ideal: dict[int, GroupFits] = {}

    def of(self, size: int, num_hosts: int, groups_at_once: int) -> GroupFits | None:
        """What was measured of groups of this shape."""
        key = (size, num_hosts, groups_at_once)
        if key not in self._of:
            found: dict[Collective, tuple[LinkFit, ...]] = {}
            for (collective, *shape), fits in self._fits.items():
                counts = [count for count in fits if count >= groups_at_once]
                if tuple(shape) == (size, num_hosts) and counts:
                    found[collective] = (fits[min(counts)],)
            self._of[key] = GroupFits(found) if found else None
        return self._of[key]

    def ideal(self, size: int) -> GroupFits:
        """The least of every shape of this size."""
        if size not in self._ideal:
            found: dict[Collective, tuple[LinkFit, ...]] = {}
            for (collective, members, _), fits in self._fits.items():
                if members == size:
                    found[collective] = (*found.get(collective, ()), *fits.values())
            self._ideal[size] = GroupFits(found, is_ideal=True)
        return self._ideal[size]
