"""Limits of the fields of a record, to annotate its types with: `Annotated[int, Ge(1)]`.

They are those of annotated_types, which pydantic knows, and expand to them when pydantic asks; to
import annotated_types itself takes longer than to read most documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

__all__ = ["Ge", "Gt", "Le", "Len", "Limit", "MaxLen"]


class Limit:
    """One limit: `allows` says whether a value is within it."""

    __is_annotated_types_grouped_metadata__: Literal[True] = True

    def __init__(self, *values: float) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        """What it is to pydantic (annotated_types.GroupedMetadata)."""
        import annotated_types

        yield getattr(annotated_types, type(self).__name__)(*self.values)

    def allows(self, value: Any) -> bool:
        """Whether a value of the annotated type is within the limit."""
        raise NotImplementedError


class Ge(Limit):
    """At least this."""

    def allows(self, value: Any) -> bool:
        return bool(value >= self.values[0])


class Gt(Limit):
    """More than this."""

    def allows(self, value: Any) -> bool:
        return bool(value > self.values[0])


class Le(Limit):
    """At most this."""

    def allows(self, value: Any) -> bool:
        return bool(value <= self.values[0])


class MaxLen(Limit):
    """At most so many items, or characters."""

    def allows(self, value: Any) -> bool:
        return len(value) <= self.values[0]


class Len(Limit):
    """At least and at most so many items, or characters."""

    def allows(self, value: Any) -> bool:
        return self.values[0] <= len(value) <= self.values[1]
