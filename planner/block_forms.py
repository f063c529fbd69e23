"""Which problems are one repeated block, and the ways to spread what lies before and after it.

`variants` fixes first what would make the tails of ranks unlike; `block_forms` are then the ways to
give the other layers to stages. `planner/blocks.py` solves each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

from planner.problem import Option, StageProblem

__all__ = ["BlockForm", "block_forms", "variants"]

MOST_VARIANTS = MOST_FORMS = 64
"""They double with every layer before or after the blocks (that can be divided); models of many
unlike layers go to the general program."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Which run holds the blocks, and which others lie where.

    before[i], after[i]: runs of pipeline rank i before and after its blocks (interleaved: of the
    first and the last stage). blocks[i]: whether it can have blocks. last[i]: its last run where
    that is given, None where the rank ends among the blocks.
    """

    main: int
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    blocks: tuple[bool, ...]
    last: tuple[int | None, ...]


def variants(problem: StageProblem) -> list[StageProblem]:
    """The problem once for each way to choose between options of unlike tails, layer by layer; as
    it is where that would be too many, or of no use.

    Options differ in what follows the last backward only by holding a layer whole or divided.
    """
    classes = [list(dict.fromkeys(_tail_of(option) for option in options))
               for options in problem.options]
    mixed = any(run.count > 1 and len(tails) > 1
                for run, tails in zip(problem.runs, classes, strict=True))
    if problem.candidate.mesh.pp == 1 or mixed or math.prod(map(len, classes)) > MOST_VARIANTS:
        return [problem]
    return [replace(problem, options=tuple(
        tuple(o for o in options if _tail_of(o) == tail)
        for options, tail in zip(problem.options, tails, strict=True)))
        for tails in product(*classes)]


def _tail_of(option: Option) -> tuple[tuple[float, float], ...]:
    return tuple((c.parameters.reduce_s, c.parameters.optimizer_s + c.parameters.norm_s)
                 for c in option.costs)


def block_forms(problem: StageProblem) -> list[BlockForm]:
    """The ways to spread what is not blocks; none if the problem is not of this kind."""
    p, runs = problem.candidate.mesh.pp, problem.runs
    if problem.candidate.schedule.name == "gpipe" and p > 1:
        return []  # two maxima, forward and backward
    if problem.overlaps and not _reduction_hides(problem):
        return []
    if p == 1:
        return [BlockForm(0, ((),), (tuple(range(1, len(runs))),), (True,), (None,))]
    if any(len({_tail_of(o) for o in options}) > 1 for options in problem.options):
        return []
    many = [r for r, run in enumerate(runs) if run.count > 1]
    if len(many) != 1:
        return []
    forms = _spreads(problem, many[0])
    return forms if all(_cuts_alike(problem, form) for form in forms) else []


def _spreads(problem: StageProblem, main: int) -> list[BlockForm]:
    """Every way to give the runs before and after the blocks to ranks, in order; none if too many.

    The first ranks have some of what is before and nothing else, the last ranks some of what is
    after; those between share the blocks, and the rest goes to the first and the last of them.
    """
    p, num_runs = problem.candidate.mesh.pp, len(problem.runs)
    most = p - 1 if problem.candidate.schedule.chunks == 1 else 0
    forms: list[BlockForm] = []
    for front in _pieces(range(main), most):
        for back in _pieces(range(main + 1, num_runs), most):
            shared = p - (len(front) - 1) - (len(back) - 1)
            if shared < 1:
                continue
            if len(forms) == MOST_FORMS:
                return []
            idle: list[tuple[int, ...]] = [()] * (shared - 1)
            before = (*front, *idle, *[()] * (len(back) - 1))
            after = (*[()] * (len(front) - 1), *idle, *back)
            blocks = (*[False] * (len(front) - 1), *[True] * shared, *[False] * (len(back) - 1))
            last = (*(piece[-1] for piece in front[:-1]), *[None] * (shared - 1),
                    *(piece[-1] for piece in back[:-1]), None)
            forms.append(BlockForm(main, before, after, blocks, last))
    return forms


def _pieces(runs: range, most: int) -> list[tuple[tuple[int, ...], ...]]:
    """Every way to cut runs into pieces, with at most `most` cuts."""
    return [tuple(tuple(runs[a:b]) for a, b in pairwise((0, *cuts, len(runs))))
            for number in range(min(most, max(len(runs) - 1, 0)) + 1)
            for cuts in combinations(range(1, len(runs)), number)]


def _cuts_alike(problem: StageProblem, form: BlockForm) -> bool:
    """Whether every cut that a number of blocks can mean costs the same."""
    for i in range(problem.candidate.mesh.pp - 1):
        around = [problem.after[i][form.main]] if form.main + 1 < len(problem.runs) else []
        around += [problem.after[i][form.main - 1]] if form.main else []
        if form.last[i] is None and any(cut != problem.inside[i][form.main] for cut in around):
            return False
    return True


def _reduction_hides(problem: StageProblem) -> bool:
    """Whether the last reduction hides behind any backward, so that choices do not change the
    tail."""
    if problem.candidate.mesh.pp > 1:
        return False
    reduce = sum(costs[0].parameters.reduce_s for _, costs, _ in problem.ties)
    window = 0.0
    for run, options in zip(problem.runs, problem.options, strict=True):
        reduce += run.count * max(o.costs[0].parameters.reduce_s for o in options)
        window += run.count * min(o.costs[0].window_s for o in options)
    return window >= reduce
