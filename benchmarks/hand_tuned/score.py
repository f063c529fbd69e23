"""Who was how fast: medians, spreads, ranks and regret, from the seconds of a contest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import Any

from benchmarks.published.score import spearman

__all__ = ["NEAR", "Score", "geometric_mean", "rank_correlation", "score", "speed_ups", "spread"]

NEAR = 0.03
"""A plan that loses by less is as good as the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The plan among all that ran.

    regret: how much longer its step takes than the best other's (0 if it is the fastest itself);
        None if the plan did not run. noise: half the range of that ratio over the turns.
    """

    rank: int | None
    num_ran: int
    best: str
    regret: float | None
    noise: float
    rank_correlation: float | None

    @property
    def is_near(self) -> bool:
        return self.regret is not None and self.regret <= NEAR


def spread(values: Sequence[float]) -> float:
    """Half the range, as a share of the median."""
    return (max(values) - min(values)) / 2 / median(values) if values else 0.0


def score(rows: Sequence[dict[str, Any]]) -> Score:
    """The score of the plan, whose row is the first.

    The best other is chosen by the first turns and compared in the final ones, turn by turn: the
    luckiest of many would look better than it is.
    """
    ran = [row for row in rows if row["measured_s"] is not None]
    plan = rows[0]
    if plan["measured_s"] is None or len(ran) < 2:
        best = min(ran, key=lambda r: r["measured_s"])["names"][0] if ran else ""
        alone = plan["measured_s"] is not None
        return Score(rank=1 if alone else None, num_ran=len(ran), best=best, noise=0.0,
                     regret=0.0 if alone else None, rank_correlation=None)
    others = [row for row in ran if row is not plan]
    finalists = [row for row in others if row["final_s"]] or others
    which = "final_s" if finalists[0]["final_s"] else "turns_s"
    rival = min(finalists, key=lambda row: median(row[which]))
    ratios = [mine / theirs for mine, theirs in zip(plan[which], rival[which], strict=False)]
    regret = max(0.0, median(ratios) - 1)
    faster = sum(row["measured_s"] < plan["measured_s"] for row in others)
    names = rival["names"][0] if median(ratios) > 1 else plan["names"][0]
    return Score(rank=1 + faster, num_ran=len(ran), best=names, regret=regret,
                 noise=(max(ratios) - min(ratios)) / 2,
                 rank_correlation=rank_correlation([row["predicted_s"] for row in ran],
                                                   [row["measured_s"] for row in ran]))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's; None of fewer than three."""
    return spearman(a, b) if len(a) >= 3 else None


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return exp(sum(map(log, values)) / len(values)) if values else None


def speed_ups(results: Sequence[dict[str, Any]], recipe: str) -> list[float]:
    """How many times as fast as a recipe the plan was, in each scenario where both ran."""
    found = []
    for result in results:
        plan = result["rows"][0]["measured_s"]
        theirs = [row["measured_s"] for row in result["rows"]
                  if recipe in row["names"] and row["measured_s"] is not None]
        if plan is not None and theirs:
            found.append(theirs[0] / plan)
    return found
