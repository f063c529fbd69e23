"""Why predictions miss: known causes, as data (`causes.json`), for the rows that they explain.

An entry is about some rows of one source, in one direction; it says what it rests on. A row that
no entry is about is printed with the terms of its prediction, and "unknown".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from benchmarks.published.price import Priced
from profiler.documents import STRICT, load_shipped
from profiler.limits import Ge, Gt, Le, MaxLen

__all__ = ["Cause", "Causes", "cause_of", "known_causes", "largest_terms"]

FILE = Path(__file__).parent / "causes.json"

Name = Annotated[str, MaxLen(200)]
Text = Annotated[str, MaxLen(2000)]
Share = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why rows of a source miss.

    kind: `model`: what the cost model lacks or takes wrongly; `table`: the table contradicts itself
        or says something that cannot be; `unknown`: looked for and not found.
    model: pattern of the whole model name. where: texts that columns of the row must have.
    direction: of the prediction. least: relative error from which on it is an explanation.
    """

    __pydantic_config__: ClassVar = STRICT

    name: Name
    kind: Literal["model", "table", "unknown"]
    source: Name
    model: Name = ".*"
    where: dict[Name, tuple[Name, ...]]
    direction: Literal["too fast", "too slow"]
    least: Annotated[float, Ge(0), Le(1)] = 0.05
    cause: Text
    evidence: Text

    def explains(self, row: Priced) -> bool:
        """Whether the entry is about a row and its error."""
        error = row.error if self.direction == "too slow" else -row.error
        return (row.source_id == self.source and error >= self.least
                and re.fullmatch(self.model, row.cells.text("model")) is not None
                and all(row.cells.text(column) in texts for column, texts in self.where.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """The file of causes, and the marks that errors are held to.

    marks: mean relative error of a source, on models that nothing was fitted on. regret_mark: of a
        sweep.
    """

    __pydantic_config__: ClassVar = STRICT

    meshwright: Literal["Causes"] = "Causes"
    version: Literal[1] = 1
    marks: dict[Name, Share]
    regret_mark: Share
    causes: tuple[Cause, ...]


@functools.cache
def known_causes() -> Causes:
    """The file beside this module."""
    return load_shipped(Causes, FILE)


def cause_of(row: Priced, causes: Iterable[Cause]) -> Cause | None:
    """The first entry that explains a row."""
    return next((cause for cause in causes if cause.explains(row)), None)


def largest_terms(row: Priced, count: int = 3) -> str:
    """The largest terms of a prediction, in per cent of its step."""
    assert row.layout.prediction is not None
    terms = sorted(row.layout.prediction.step_terms_s.items(), key=lambda term: -term[1])[:count]
    return ", ".join(f"{name.replace('_', ' ')} {100 * seconds / row.predicted_s:.0f} %"
                     for name, seconds in terms)
