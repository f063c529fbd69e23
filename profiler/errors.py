"""The errors of Meshwright, one tree.

    MeshwrightError
    ├── InvalidInput          the user gave something that cannot be used        (exit status 2)
    │   ├── UnknownName       no model, topology or device of that name
    │   └── UnsupportedLayout a layout that is illegal for its model, devices or executor
    ├── Infeasible            the request is legal, and nothing fits              (exit status 3)
    ├── Interrupted           stopped by the user before a first answer           (exit status 130)
    └── InternalError         our own mistake: two computations of one figure disagree

A message says what is wrong, with the values, and what would be legal; when several things are
wrong, all of them are said at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "Infeasible",
    "InternalError",
    "Interrupted",
    "InvalidInput",
    "MeshwrightError",
    "UnknownName",
    "UnsupportedLayout",
]


class MeshwrightError(Exception):
    """Root of everything that Meshwright raises on purpose."""

    exit_status = 1


class InvalidInput(MeshwrightError):
    """The user's input cannot be used; `problems` lists every reason."""

    exit_status = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class UnknownName(InvalidInput):
    """No such model, topology or device; the message offers the nearest names."""

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        offer = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}."
        super().__init__(f"unknown {what} {name!r}: {offer}{' ' + hint if hint else ''}")


class UnsupportedLayout(InvalidInput):
    """The layout is not legal for this model, these devices or this executor."""


class Infeasible(MeshwrightError):
    """Nothing in the space fits; `diagnosis` says why and what would."""

    exit_status = 3

    def __init__(self, message: str, diagnosis: object | None = None) -> None:
        self.diagnosis = diagnosis
        super().__init__(message)


class Interrupted(MeshwrightError):
    """The user stopped the work before there was anything to keep."""

    exit_status = 130


class InternalError(MeshwrightError):
    """A check of our own failed; please report it with the request that caused it."""
