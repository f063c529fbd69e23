"""`python -m profiler links`: the collectives of the running processes, as a document."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from profiler.documents import dump, write_atomically
from profiler.links import Links
from profiler.measure_links import LinkOptions, measure_links, shapes_of
from profiler.model_command import progress_bar

__all__ = ["write_links"]


def write_links(output: str, quiet: bool, **fields: Any) -> Links:
    """Measure on every process, write on the first."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    shapes = shapes_of(world, per_host)
    options = LinkOptions(**fields)
    total = 1 + sum(name != "send" or shape.size == 2 for shape in shapes
                    for name in options.collectives)
    with progress_bar(quiet or rank > 0, total) as advance:
        links = measure_links(options, advance)
    if rank == 0:
        write_atomically(output, dump(links))
        _print(links)
    dist.barrier()
    dist.destroy_process_group()
    return links


def _print(links: Links) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("collective", "ranks", "hosts", "at once", "latency", "bandwidth", "error"):
        table.add_column(name, justify="left" if name == "collective" else "right")
    for fit in links.fits:
        table.add_row(fit.collective.replace("_", "-"), str(fit.group_size), str(fit.num_hosts),
                      str(fit.groups_at_once), f"{fit.latency_s * 1e6:,.0f} us",
                      f"{fit.bytes_per_s / 1e9:,.3g} GB/s", f"{fit.error:.0%}")
    console = Console()
    console.print(table)
    console.print(f"compute is {links.overlap_slowdown or 1:.2f} times as long beside a collective")
    for note in links.busy:
        console.print(f"note: {note}")
