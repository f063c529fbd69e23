"""python -m benchmarks.published [--table T] [--memory M] [-o results/]

Prices every row of a table of published measurements with the planner's own cost functions and
prints how far off it is. Without a table, the compact one that this folder holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from benchmarks.published.memory import memory_results
from benchmarks.published.price import price_rows
from benchmarks.published.report import make_results, print_results, to_json
from benchmarks.published.score import by_source
from benchmarks.published.table import measured_rows, memory_rows
from profiler.documents import write_atomically
from profiler.errors import InvalidInput, MeshwrightError

HERE = Path(__file__).parent


@click.command(help=__doc__)
@click.option("--table", type=click.Path(path_type=Path), help="measurements (CSV)")
@click.option("--memory", type=click.Path(path_type=Path), help="facts about memory (CSV)")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="folder for JSON, pictures")
@click.option("--worst", default=10, show_default=True, help="worst rows to print")
def main(table: Path | None, memory: Path | None, output: Path | None, worst: int) -> None:
    try:
        _run(table, memory, output, worst)
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _run(table: Path | None, memory: Path | None, output: Path | None, worst: int) -> None:
    if table is None and memory is None:
        table, memory = HERE / "measured.csv", HERE / "memory.csv"
    measured = measured_rows(table) if table is not None else ()
    facts = memory_rows(memory) if memory is not None else ()
    priced, refused = price_rows(measured)
    compared, uncompared = memory_results(facts, measured)
    results = make_results(priced, refused, compared, uncompared)
    print_results(results, Console(width=None if sys.stdout.isatty() else 150), worst)
    if output is None:
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{output}: cannot be made: {error.strerror or error}") from None
    write_atomically(output / "published.json",
                     json.dumps(to_json(results), indent=1, allow_nan=False) + "\n")
    if priced:
        from benchmarks.published.pictures import draw

        draw(by_source(priced), output)


if __name__ == "__main__":
    main()
