"""How figures and names are written for a person."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profiler.layer_graph import LayerGraph

__all__ = ["GIB", "LayerNames", "gib", "printable", "ranges", "scaled", "seconds", "share", "term"]

GIB = 2**30


def seconds(value: float) -> str:
    """Seconds with a unit of their size, four digits."""
    size = abs(value)
    if size >= 1 or not size:
        return f"{_digits(value)} s" if size else "0 s"
    return f"{_digits(1e3 * value)} ms" if size >= 1e-3 else f"{_digits(1e6 * value)} µs"


def scaled(value: float, unit: str = "") -> str:
    """A large figure with a decimal prefix: 8.03 B(illion) parameters, 989 T FLOP/s."""
    for prefix, size in (("T", 1e12), ("B" if not unit else "G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{_digits(value / size, 3)} {prefix}{unit}"
    return f"{_digits(value, 3)} {unit}".rstrip()


def _digits(value: float, digits: int = 4) -> str:
    """So many significant digits, never in scientific notation."""
    before = len(f"{abs(value):.0f}")
    return f"{value:,.{max(0, digits - before)}f}"


def gib(num_bytes: float) -> str:
    """Bytes as GiB."""
    value = num_bytes / GIB
    return f"{value:,.2f}" if abs(value) >= 0.005 or num_bytes == 0 else "< 0.01"


def share(part: float) -> str:
    """A fraction as a percentage."""
    return f"{100 * part:.1f} %"


def term(name: str) -> str:
    """A term's name in words."""
    return name.replace("_", " ")


def ranges(numbers: Iterable[int]) -> str:
    """`0-7, 16-23` for the numbers in increasing order."""
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        members = [number for _, number in run]
        parts.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return ", ".join(parts)


class LayerNames:
    """Layers by their names, neighbours that are numbered on taken together: `layers 0-15`."""

    def __init__(self, graph: LayerGraph) -> None:
        names = [printable(layer.name) for layer in graph.layers]
        first = {name.split(".", 1)[0] for name in names if "." in name}
        prefix = f"{first.pop()}." if len(first) == 1 and len(names) > 2 else ""
        self.names = [name.removeprefix(prefix) for name in names]

    def text(self, layers: Sequence[int]) -> str:
        """The layers, in increasing order, as ranges of names."""
        runs: list[_Run] = []
        for layer in layers:
            before, number, after = _numbered(self.names[layer])
            run = _Run(layer, before, after, number, number)
            last = runs[-1] if runs else None
            if last is not None and last.precedes(run):
                last.layer, last.high = layer, number
            else:
                runs.append(run)
        return ", ".join(run.text() if last is None or not last.like(run) else run.numbers()
                         for last, run in zip([None, *runs], runs, strict=False))


@dataclass(slots=True)
class _Run:
    """Neighbouring layers whose names differ in a number that counts on; the last of them."""

    layer: int
    before: str
    after: str
    low: int | None
    high: int | None

    def precedes(self, other: _Run) -> bool:
        return (self.layer + 1 == other.layer and self.high is not None
                and (self.before, self.after, self.high + 1)
                == (other.before, other.after, other.low))

    def like(self, other: _Run) -> bool:
        """Whether the numbers alone say what the other is: `layers 0-3, 8-9`."""
        return (self.low is not None and other.low is not None and not self.after
                and self.before.endswith(".")
                and (self.before, self.after) == (other.before, other.after))

    def numbers(self) -> str:
        return f"{self.low}-{self.high}" if self.low != self.high else f"{self.low}"

    def text(self) -> str:
        if self.low is None:
            return self.before
        if not self.after and self.before.endswith("."):
            return f"{self.before[:-1]} {self.numbers()}"
        return f"{self.before}{self.numbers()}{self.after}"


def _numbered(name: str) -> tuple[str, int | None, str]:
    """Cut a name at its last number: `h.12.attn` is (`h.`, 12, `.attn`)."""
    found = re.fullmatch(r"(.*?)(\d{1,9})(\D*)", name, flags=re.DOTALL)
    return (found[1], int(found[2]), found[3]) if found else (name, None, "")


def printable(text: str) -> str:
    """The text with control characters shown rather than sent to the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
