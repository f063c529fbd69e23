"""What `plan models` and `plan topologies` print: plain text, since grep reads it as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from planner.report.words import gib, printable, scaled, seconds

if TYPE_CHECKING:
    from planner.topology import HostGroup, Link, Topology

__all__ = ["models", "topologies", "topology"]

WIDTH = 100


def models() -> str:
    """The catalogue, a model a line."""
    from planner.models import catalogue

    rows = [("name", "parameters", "layers", "longest", "samples", "")]
    rows += [(entry.name, f"{entry.num_parameters:,}", f"{entry.num_layers}",
              f"{entry.max_seq_len:,}" if entry.max_seq_len else "-", entry.sample, entry.note)
             for entry in catalogue()]
    return _columns(rows, right={1, 2, 3})


def topologies() -> str:
    """The presets, a topology a line."""
    from planner.topology_files import PRESETS, names
    from profiler.documents import read_shipped

    rows = [("name", "one host")]
    rows += [(name, read_shipped(PRESETS / f"{name}.json")["description"]) for name in names()]
    return "\n".join([
        _columns(rows, right=set()), "",
        "NAME:16 is sixteen hosts; NAME:2+NAME:2 are two kinds together; 'local' is this machine.",
        "`plan topologies NAME` shows the figures of one, with their sources."])


def topology(name: str) -> str:
    """One topology: its hosts, devices and links, with the source of each figure."""
    from planner.topology_files import resolve

    found = resolve(name)
    lines = [f"{printable(found.name)}: {_plural(found.num_devices, 'device')} in "
             f"{_plural(found.num_hosts, 'host')}"]
    for group in found.hosts:
        lines += ["", *_group(group)]
    lines += _network(found)
    return "\n".join(lines)


def _group(group: HostGroup) -> list[str]:
    device = group.device
    lines = [f"{_plural(group.count, 'host')} of {group.devices_per_host} x {device.name}"
             f"{': ' + device.description if device.description else ''}"]
    figures = [("memory", f"{gib(device.memory_bytes)} GiB", "memory_bytes"),
               ("memory bandwidth", scaled(device.memory_bandwidth_bytes_per_s, "B/s"),
                "memory_bandwidth_bytes_per_s")]
    figures += [(f"peak {dtype}", scaled(peak, "FLOP/s"), "peak_flops_per_s")
                for dtype, peak in device.peak_flops_per_s.items()]
    rows, told = [], ""
    for name, value, key in figures:
        source = device.sources.get(key, "")
        rows.append((f"  {name}", value, source if source != told else ""))
        told = source
    rows.append(_link("between devices", group.device_link))
    cards = f"{_plural(group.cards_per_host, 'card')} between hosts"
    rows.append(_link(cards, group.network_card))
    return [*lines, _columns([tuple(printable(cell) for cell in row) for row in rows], right={1})]


def _link(name: str, link: Link) -> tuple[str, str, str]:
    rest = f"each way, of which collectives reach {link.efficiency:.0%}; {seconds(link.latency_s)}"
    if link.aggregate_bytes_per_s is not None:
        rest += f"; all links of a host together {scaled(link.aggregate_bytes_per_s, 'B/s')}"
    return (f"  {name}", scaled(link.bandwidth_bytes_per_s, "B/s"),
            f"{rest}{'. ' + link.source if link.source else ''}")


def _network(found: Topology) -> list[str]:
    rows = [(f"  {printable(level.name)}", f"{level.hosts_per_group:,} hosts under a switch",
             "non-blocking" if level.uplink_bytes_per_s is None
             else f"{scaled(level.uplink_bytes_per_s, 'B/s')} up") for level in found.network]
    return ["", "network", _columns(rows, right=set())] if rows else []


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _columns(rows: Iterable[Sequence[str]], right: set[int]) -> str:
    """Rows in aligned columns; the last one wraps below itself."""
    import textwrap

    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) if i in right else cell.ljust(width)
                 for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        start = "  ".join(cells[:-1]) + "  "
        rest = textwrap.wrap(row[-1], max(30, WIDTH - len(start))) or [""]
        if len(row) - 1 in right:
            rest = [cells[-1]]
        lines.append((start + rest[0]).rstrip())
        lines += [" " * len(start) + line for line in rest[1:]]
    return "\n".join(lines)
