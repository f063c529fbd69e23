"""The line on standard error that shows how far a search is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from planner.report.words import seconds

if TYPE_CHECKING:
    from planner.search import Progress

__all__ = ["describe", "progress_line"]


def describe(progress: Progress) -> str:
    """Incumbent, bound and counts in one line."""
    best = "-" if progress.incumbent_s is None else seconds(progress.incumbent_s)
    bound = "-" if progress.bound_s is None else seconds(progress.bound_s)
    counts = f"{progress.candidates:,} candidates, {progress.solved:,} solved"
    parts = [f"best {best}", f"bound {bound}", counts, progress.message]
    return " | ".join(part for part in parts if part)


@contextmanager
def progress_line(quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A function that redraws the line; None where nobody looks."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    with console.status("planning (Ctrl-C keeps the best so far)") as status:
        yield lambda progress: status.update(describe(progress))
