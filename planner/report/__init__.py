"""The printed report of a layout: what was chosen, what it costs, and how that is proven."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.topology import Topology
    from profiler.layer_graph import LayerGraph

__all__ = ["WIDTH", "print_check", "print_plan"]

WIDTH = 100
"""Columns of the report where standard output is no terminal, and at most."""


def print_plan(layout: Layout, graph: LayerGraph, topology: Topology, *, wall_s: float) -> None:
    """The report of a planned layout.

    wall_s: what the search took; it is not in the layout, so that equal requests give equal bytes.
    """
    _print(layout, graph, topology, wall_s)


def print_check(layout: Layout, graph: LayerGraph, topology: Topology) -> None:
    """The report of a priced layout, and whether it fits."""
    _print(layout, graph, topology, None)


def _print(layout: Layout, graph: LayerGraph, topology: Topology, wall_s: float | None) -> None:
    from rich.console import Console

    from planner.report.sections import Subject, sections

    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    if not console.is_terminal or console.width > WIDTH:
        console.width = WIDTH
    with console.capture() as capture:
        for section in sections(Subject(layout, graph, topology, wall_s)):
            console.print(section)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
