"""From sizes measured at a few points to exact polynomials in micro-batch b and sequence length s.

A model is run (on fake tensors) at six points, which determine the six coefficients of an `Extent`,
and at a seventh, which must agree. Micro-batches start at 2, so that no dimension is 1 by
accident and no copy is skipped because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from profiler.errors import InternalError
from profiler.layer_graph import Extent

__all__ = ["Fit", "image_points", "token_points"]

Point = tuple[int, int]


def token_points(step: int) -> tuple[Point, ...]:
    """(b, s) of every run of a model of tokens: s in {step, 2 step, 3 step}, then one check."""
    return (*((b, step * k) for b in (2, 3) for k in (1, 2, 3)), (5, 4 * step))


def image_points() -> tuple[Point, ...]:
    """(b, 1) of every run of a model whose samples all have one size, then one check."""
    return ((2, 1), (3, 1), (5, 1))


def _exact(numerator: int, denominator: int, values: Sequence[int]) -> int:
    quotient, rest = divmod(numerator, denominator)
    if rest:
        raise InternalError(f"a size is no integer polynomial in micro-batch and sequence length: "
                            f"{list(values)}")
    return quotient


def _quadratic(values: Sequence[int], step: int) -> tuple[int, int, int]:
    """Coefficients of c0 + c1*s + c2*s^2 through s = step, 2 step, 3 step."""
    first, second, third = values
    c2 = _exact(third - 2 * second + first, 2 * step * step, values)
    c1 = _exact(second - first - 3 * c2 * step * step, step, values)
    return first - c1 * step - c2 * step * step, c1, c2


@dataclass(frozen=True, slots=True)
class Fit:
    """The polynomial through the values of one size at `points`."""

    points: tuple[Point, ...]
    known: dict[tuple[int, ...], Extent]

    @classmethod
    def over(cls, points: tuple[Point, ...]) -> Fit:
        return cls(points, {})

    def of(self, value_at: Callable[[int], int]) -> Extent:
        """The Extent of the size whose value in run i is `value_at(i)`.

        Raises:
            InternalError: the values are no polynomial of the form that `Extent` holds.
        """
        values = tuple(value_at(index) for index in range(len(self.points)))
        if values not in self.known:
            self.known[values] = self._solve(values)
        return self.known[values]

    def _solve(self, values: tuple[int, ...]) -> Extent:
        if len(self.points) == 3:
            one, two = (values[0], 0, 0), (values[1], 0, 0)
        else:
            step = self.points[0][1]
            one, two = _quadratic(values[:3], step), _quadratic(values[3:6], step)
        per = (two[0] - one[0], two[1] - one[1], two[2] - one[2])
        fixed = (one[0] - 2 * per[0], one[1] - 2 * per[1], one[2] - 2 * per[2])
        extent = Extent(fixed=fixed, per_sample=per)
        micro_batch, seq_len = self.points[-1]
        if extent.at(micro_batch, seq_len) != values[-1]:
            raise InternalError(
                f"a size does not grow as a quadratic in the sequence length times the "
                f"micro-batch: {list(values)} at (b, s) = {list(self.points)}")
        return extent
