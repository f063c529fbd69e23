"""A small builder of linear programs, handed to OR-Tools' solver wrapper when complete.

The wrapper's own expressions cost more than solving our programs does; here an expression is a list
of
(coefficient, variable) with a constant, and rows are loaded in one go. CP-SAT solves the integer
programs and GLOP their relaxations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

__all__ = ["Expression", "LinearProgram", "SolverResult", "total"]


class Expression:
    """A linear expression: sum of coefficient * variable, plus a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self, terms: list[tuple[float, int]], constant: float = 0) -> None:
        self.terms = terms
        self.constant = constant

    @property
    def is_constant(self) -> bool:
        return not self.terms

    def __add__(self, other: Expression) -> Expression:
        return Expression(self.terms + other.terms, self.constant + other.constant)

    def __sub__(self, other: Expression) -> Expression:
        return Expression(self.terms + [(-c, v) for c, v in other.terms],
                          self.constant - other.constant)

    def __mul__(self, factor: float) -> Expression:
        if factor == 0:
            return Expression([])
        return Expression([(factor * c, v) for c, v in self.terms], factor * self.constant)

    __rmul__ = __mul__

    def value(self, values: list[float]) -> float:
        return self.constant + sum(c * values[v] for c, v in self.terms)


def total(parts: Iterable[Expression]) -> Expression:
    """The sum of expressions."""
    terms: list[tuple[float, int]] = []
    constant = 0.0
    for part in parts:
        terms += part.terms
        constant += part.constant
    return Expression(terms, constant)


@dataclass(frozen=True, slots=True)
class SolverResult:
    """status: optimal, feasible, infeasible or unknown; bound: of the objective, from below."""

    status: str
    values: list[float] | None
    objective: float
    bound: float


class LinearProgram:
    """Variables, rows and an objective to be minimised."""

    def __init__(self) -> None:
        self._bounds: list[tuple[float, float]] = []
        self._rows: list[Expression] = []
        self._objective = Expression([])
        self._impossible = False

    def variable(self, low: float, high: float) -> Expression:
        """A new variable (whole, in the integer program) in low..high."""
        if low == high:
            return Expression([], low)
        self._bounds.append((low, high))
        return Expression([(1, len(self._bounds) - 1)])

    def at_least(self, expression: Expression, low: float = 0) -> None:
        """Require expression >= low."""
        if expression.is_constant:
            self._impossible |= expression.constant < low
        else:
            self._rows.append(Expression(expression.terms, expression.constant - low))

    def equal(self, left: Expression, right: Expression) -> None:
        """Require left = right."""
        self.at_least(left - right)
        self.at_least(right - left)

    def minimise(self, objective: Expression) -> None:
        self._objective = objective

    def solve(self, *, integer: bool, parameters: str = "",
              time_limit_s: float | None = None) -> SolverResult:
        """Solve; `parameters` is CP-SAT's text form."""
        if self._impossible:
            return SolverResult("infeasible", None, inf, inf)
        from ortools.linear_solver import pywraplp  # here: many searches end without a program

        names = {pywraplp.Solver.OPTIMAL: "optimal", pywraplp.Solver.FEASIBLE: "feasible",
                 pywraplp.Solver.INFEASIBLE: "infeasible"}
        solver = pywraplp.Solver.CreateSolver("SAT" if integer else "GLOP")
        if parameters:
            solver.SetSolverSpecificParametersAsString(parameters)
        if time_limit_s is not None:
            solver.SetTimeLimit(max(1, int(time_limit_s * 1000)))
        make = solver.IntVar if integer else solver.NumVar
        variables = [make(low, high, "") for low, high in self._bounds]
        for row in self._rows:
            constraint = solver.Constraint(-row.constant, solver.infinity())
            for variable, coefficient in _merged(row).items():
                constraint.SetCoefficient(variables[variable], coefficient)
        objective = solver.Objective()
        for variable, coefficient in _merged(self._objective).items():
            objective.SetCoefficient(variables[variable], coefficient)
        objective.SetOffset(self._objective.constant)
        objective.SetMinimization()
        status = names.get(solver.Solve(), "unknown")
        if status == "infeasible":
            return SolverResult(status, None, inf, inf)
        if status == "unknown":
            return SolverResult(status, None, inf, -inf)
        value = objective.Value()
        bound = value if status == "optimal" else objective.BestBound()
        return SolverResult(status, [v.solution_value() for v in variables], value, bound)


def _merged(expression: Expression) -> dict[int, float]:
    merged: dict[int, float] = {}
    for coefficient, variable in expression.terms:
        merged[variable] = merged.get(variable, 0) + coefficient
    return merged
