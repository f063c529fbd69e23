"""The two shapes of the report: a table of figures, and labelled lines."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

__all__ = ["figures", "lines"]


def figures(*columns: str, right: Sequence[str] = (), unbroken: Sequence[str] = ()) -> Table:
    """A table without frames; `right` are set to the right, `unbroken` never wrap."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold",
                         no_wrap=name in unbroken)
    return table


def lines(rows: Sequence[tuple[str, str]]) -> Table:
    """Labels and what they say, wrapped beside them."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(f"  {label}", text)
    return table
