"""Tables of published measurements: rows of a CSV file, validated.

Only what is used is read; more columns do no harm. A missing column or an unreadable file is one
error; a cell that cannot be used makes its row one that is refused, with the cell as the reason.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from profiler.errors import InvalidInput

__all__ = ["Cells", "MEASURED_COLUMNS", "MEMORY_COLUMNS", "MeasuredRow", "MemoryRow",
           "UnusableRow", "measured_rows", "memory_rows"]

MAX_BYTES = 64 * 2**20
"""Largest table read: 40 times the largest known."""

LAYOUT_COLUMNS = (
    "source_id", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "gated_mlp",
    "vocab", "seq", "n_experts", "gpu", "gpus", "gbs", "mbs", "dp", "tp", "pp", "vpp", "cp", "ep",
    "dp_shard", "sp", "recompute", "precision", "impl", "notes")
MEASURED_COLUMNS = ("row_id", *LAYOUT_COLUMNS, "gpus_per_node", "interconnect", "step_time_s",
                    "tokens_s_gpu", "status")
MEMORY_COLUMNS = ("fact_id", *LAYOUT_COLUMNS, "kind", "verdict", "value", "unit", "value_kind",
                  "measured_row_id")


class UnusableRow(Exception):
    """A row that cannot be priced; the message is the reason, the same for all rows like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The text of one row."""

    values: dict[str, str]

    def text(self, column: str) -> str:
        return self.values.get(column, "").strip()

    def number(self, column: str, *, most: float = 1e15) -> float | None:
        """A positive number; None where the cell is empty.

        Raises:
            UnusableRow: anything else.
        """
        text = self.text(column)
        if not text or text.lower() in ("nan", "none", "n/a"):
            return None
        try:
            value = float(text)
        except ValueError:
            raise UnusableRow(f"{column} is not a number") from None
        if not math.isfinite(value) or value < 0 or value > most:
            raise UnusableRow(f"{column} is not a positive number")
        return value

    def count(self, column: str, *, most: int = 10**7) -> int | None:
        """A positive whole number; None where the cell is empty (or 0)."""
        value = self.number(column, most=most)
        if value is None or value == 0:
            return None
        if value != int(value):
            raise UnusableRow(f"{column} is not a whole number")
        return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One measured run: its cells, and the seconds of a step if the table says them."""

    row_id: str
    source_id: str
    cells: Cells
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One fact about memory: a verdict, a peak in the source's unit, or both."""

    row_id: str
    source_id: str
    cells: Cells
    verdict: str
    measured_row_id: str


def _read(path: str | Path, needed: tuple[str, ...]) -> Iterator[Cells]:
    path = Path(path)
    try:
        if path.is_dir():
            raise InvalidInput(f"{path}: is a directory, a CSV file is needed")
        if path.stat().st_size > MAX_BYTES:
            raise InvalidInput(f"{path}: larger than {MAX_BYTES:,} bytes")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, restval="")
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            if missing:
                raise InvalidInput(f"{path}: has no column {', '.join(missing)}; a table has "
                                   f"the columns {', '.join(needed)}")
            for row in reader:
                yield Cells(values={k: v or "" for k, v in row.items() if isinstance(k, str)
                                    and not isinstance(v, list)})
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not UTF-8 text: {error}") from None
    except csv.Error as error:
        raise InvalidInput(f"{path}: malformed CSV: {error}") from None


def measured_rows(path: str | Path) -> tuple[MeasuredRow, ...]:
    """The rows of a table of measurements.

    Raises:
        InvalidInput: it cannot be read, or lacks columns or rows.
    """
    rows = tuple(MeasuredRow(row_id=cells.text("row_id")[:200],
                             source_id=cells.text("source_id")[:200] or "(none)", cells=cells,
                             status=cells.text("status"))
                 for cells in _read(path, MEASURED_COLUMNS))
    if not rows:
        raise InvalidInput(f"{path}: has no rows")
    return rows


def memory_rows(path: str | Path) -> tuple[MemoryRow, ...]:
    """The rows of a table of facts about memory."""
    rows = tuple(MemoryRow(row_id=cells.text("fact_id")[:200],
                           source_id=cells.text("source_id")[:200] or "(none)", cells=cells,
                           verdict=cells.text("verdict"),
                           measured_row_id=cells.text("measured_row_id"))
                 for cells in _read(path, MEMORY_COLUMNS))
    if not rows:
        raise InvalidInput(f"{path}: has no rows")
    return rows
