"""The stage problem of one candidate: what `formulation.py` turns into a program.

For each run of equal layers the choices that can be part of a best answer (dominated ones are left
out), with their costs on every class of pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from planner.chain import Run
from planner.cost.layer import LayerCost
from planner.cost.pipeline import first_moment, in_flight
from planner.costing import Candidate, Coster, CutCost, RankContext, TieCost
from planner.division import divisible, tie_divides
from planner.layout import Choice, Mesh

__all__ = ["Option", "StageProblem", "choices_for", "least_receive", "make_problem"]


@dataclass(frozen=True, slots=True)
class Option:
    """One choice for the layers of a run; `costs` holds one entry per class of ranks."""

    choice: Choice
    costs: tuple[LayerCost, ...]

    def seconds(self, rank_class: int) -> float:
        """Per micro-batch, forward and backward."""
        cost = self.costs[rank_class]
        return cost.forward_s + cost.backward_s


@dataclass(frozen=True, slots=True)
class _RankBytes:
    """fixed: static bytes and working set; chunks: per micro-batch in flight."""

    fixed: int
    chunks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """All that the cut into stages and the choices depend on.

    options[r]: of run r. rank_class[i], capacity_bytes[i]: of pipeline rank i (capacity after
    context and communicators). inside[i][r], after[i][r]: cuts sent by rank i. ties[g]: (runs that
    hold it, cost per class, seconds of one reduction between ranks). rest_s: constant seconds.
    least_receive_s: of any cut, forward and backward.
    """

    candidate: Candidate
    runs: tuple[Run, ...]
    options: tuple[tuple[Option, ...], ...]
    contexts: tuple[RankContext, ...]
    rank_class: tuple[int, ...]
    capacity_bytes: tuple[int, ...]
    inside: tuple[tuple[CutCost, ...], ...]
    after: tuple[tuple[CutCost, ...], ...]
    ties: tuple[tuple[tuple[int, ...], tuple[TieCost, ...], float], ...]
    overlaps: bool
    rest_s: float
    least_receive_s: tuple[float, float]

    @property
    def num_layers(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def num_stages(self) -> int:
        return self.candidate.mesh.pp * self.candidate.schedule.chunks

    def first_moment(self, rank: int) -> tuple[int, ...]:
        """What rank holds in flight when its warm-up ends."""
        candidate = self.candidate
        return first_moment(candidate.schedule.name, candidate.mesh.pp, candidate.schedule.chunks,
                            candidate.num_micro_batches, rank)

    def worst_moment(self, rank: int) -> tuple[int, ...]:
        """The moment of the schedule with the most in flight."""
        candidate = self.candidate
        moments = in_flight(candidate.schedule.name, candidate.mesh.pp, candidate.schedule.chunks,
                            candidate.num_micro_batches, rank)
        return max(moments, key=sum) if len(moments) > 1 else moments[0]

    def violated_moments(self, segments: Sequence[Sequence[tuple[int, int, Choice]]]
                         ) -> list[tuple[int, tuple[int, ...]]]:
        """(rank, moment) of the worst moment of each rank that does not fit, beyond the first one.

        Only interleaved schedules have more than one.
        """
        p, v = self.candidate.mesh.pp, self.candidate.schedule.chunks
        if v == 1:
            return []
        violated = []
        for i in range(p):
            used = self._rank_bytes(segments, i)
            chunks = used.chunks
            worst = max(in_flight(self.candidate.schedule.name, p, v,
                                  self.candidate.num_micro_batches, i),
                        key=lambda n: sum(a * b for a, b in zip(n, chunks, strict=True)))
            held = sum(a * b for a, b in zip(worst, chunks, strict=True))
            if used.fixed + held > self.capacity_bytes[i]:
                violated.append((i, worst))
        return violated

    def _rank_bytes(self, segments: Sequence[Sequence[tuple[int, int, Choice]]], i: int
                    ) -> _RankBytes:
        cls, p = self.rank_class[i], self.candidate.mesh.pp
        fixed = working = 0
        chunks, held = [], set()
        for k in range(i, len(segments), p):
            chunk = 0
            for r, count, choice in segments[k]:
                memory = next(o for o in self.options[r] if o.choice == choice).costs[cls].memory
                fixed += count * memory.static_bytes
                working = max(working, memory.working_set_bytes)
                chunk += count * memory.activation_bytes
                held |= {g for g, (runs, _, _) in enumerate(self.ties) if r in runs}
            if k + 1 < len(segments):
                chunk += self.cut_after(segments[:k + 1], i).held_bytes
            chunks.append(chunk)
        fixed += sum(self.ties[g][1][cls].static_bytes for g in held)
        return _RankBytes(fixed + working, chunks)

    def cut_after(self, segments: Sequence[Sequence[tuple[int, int, Choice]]], sender: int
                  ) -> CutCost:
        """The cut behind the last of some first stages."""
        last = segments[-1][-1][0]
        done = sum(count for stage in segments for r, count, _ in stage if r == last)
        table = self.after if done == self.runs[last].count else self.inside
        return table[sender][last]


def choices_for(coster: Coster, run: Run, candidate: Candidate) -> list[Choice]:
    """Every choice that is legal for the layers of a run, in a fixed order."""
    mesh = candidate.mesh
    key = (run.first, mesh.tp, mesh.dp_shard > 1)
    if key not in coster.choice_cache:
        coster.choice_cache[key] = _choices(coster, run, mesh)
    return coster.choice_cache[key]


def _choices(coster: Coster, run: Run, mesh: Mesh) -> list[Choice]:
    capabilities, request = coster.capabilities, coster.request
    kind = coster.graph.kinds[run.kind]
    recompute = [mode for mode in capabilities.recompute
                 if request.recompute in (None, mode)]
    if kind.batch_statistics and not capabilities.batch_statistics:
        recompute = ["none"]  # or statistics would be counted twice
    reshard = [mesh.dp_shard > 1]
    if mesh.dp_shard > 1 and capabilities.reshard_per_layer:
        reshard = [True, False]
    if run.tied:
        reshard = [False]  # a tied parameter lives in the root unit, which stays gathered
    whole = [True]
    if mesh.tp > 1 and run.tied:
        whole = [all(tie_divides(coster.graph, group, mesh.tp, capabilities)
                     for group, _ in run.tied)]
    elif mesh.tp > 1 and kind.tensor_parallel is not None:
        if divisible(kind, mesh.tp, capabilities):
            whole = [False]
        elif capabilities.tensor_parallel_per_layer:
            whole = [True, False]
    return [Choice(recompute=r, reshard=s, tensor_parallel=t)
            for r, s, t in product(recompute, reshard, whole)]


def _vector(option: Option, window_times: int | None) -> tuple[float, ...]:
    values: list[float] = []
    for cost in option.costs:
        memory = cost.memory
        values += [cost.forward_s, cost.backward_s, cost.parameters.reduce_s,
                   cost.parameters.optimizer_s + cost.parameters.norm_s, memory.static_bytes,
                   memory.activation_bytes, memory.working_set_bytes,
                   memory.optimizer_temporary_bytes]
        if window_times is not None:
            values.append(window_times * (cost.forward_s + cost.backward_s) - cost.window_s)
    return tuple(values)


def _undominated(options: Sequence[Option], window_times: int | None) -> tuple[Option, ...]:
    """Without those that another equals or beats in every respect (the first of equals stays).

    A larger window hides more of the last reduction, which an option may be slower for. On a lone
    rank all m micro-batches pay that, so there m times the seconds less the window is compared;
    among stages a rank may not be the slowest, and only the window is.

    Args:
        window_times: that m; 0 among stages; None where nothing hides.
    """
    kept: list[tuple[tuple[float, ...], Option]] = []
    vectors = [(_vector(option, window_times), option) for option in options]
    for vector, option in sorted(vectors, key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, vector, strict=True)) for other, _ in kept):
            kept.append((vector, option))
    return tuple(option for _, option in kept)


def make_problem(coster: Coster, candidate: Candidate) -> StageProblem:
    """The stage problem of a candidate."""
    mesh = candidate.mesh
    contexts, rank_class = coster.contexts(mesh)
    overlaps = coster.overlaps(mesh)
    options = _options(coster, candidate, contexts, overlaps)
    inside, after = _cuts(coster, candidate)
    run_of_layer = {run.first: index for index, run in enumerate(coster.chain.runs)}
    ties = tuple(
        (tuple(dict.fromkeys(run_of_layer[layer] for layer, _ in places)),
         tuple(coster.tie(group, candidate, context) for context in contexts),
         coster.tie_reduction_s(group, candidate) if mesh.pp > 1 else 0.0)
        for group, places in enumerate(coster.chain.tied_places))
    return StageProblem(
        candidate=candidate, runs=coster.chain.runs, options=options, contexts=contexts,
        rank_class=rank_class, inside=inside, after=after, ties=ties,
        capacity_bytes=tuple(contexts[c].capacity_bytes - contexts[c].overhead_bytes
                             for c in rank_class),
        overlaps=overlaps, rest_s=coster.norm_latency_s(mesh),
        least_receive_s=least_receive(coster, candidate) if mesh.pp > 1 else (0.0, 0.0))


def _options(coster: Coster, candidate: Candidate, contexts: tuple[RankContext, ...],
             overlaps: bool) -> tuple[tuple[Option, ...], ...]:
    """The undominated options of every run; candidates that differ only in pp often share them."""
    times = candidate.num_micro_batches if candidate.mesh.dp_shard > 1 else 1  # 1 is the strictest
    window_times = None if not overlaps else times if candidate.mesh.pp == 1 else 0
    key = (contexts, candidate.mesh.tp, candidate.mesh.dp_shard, candidate.micro_batch,
           coster.times_of(candidate), candidate.each_micro_batch, candidate.unsharded_gradients,
           window_times)
    if key not in coster.option_cache:
        coster.option_cache[key] = tuple(
            _undominated([
                Option(choice, tuple(coster.layer(run, choice, candidate, context)
                                     for context in contexts))
                for choice in choices_for(coster, run, candidate)], window_times)
            for run in coster.chain.runs)
    options: tuple[tuple[Option, ...], ...] = coster.option_cache[key]
    return options


Cuts = tuple[tuple[CutCost, ...], ...]


def _cuts(coster: Coster, candidate: Candidate) -> tuple[Cuts, Cuts]:
    """(inside, after) of every run, per sending rank."""
    mesh, none = candidate.mesh, CutCost()
    runs = coster.chain.runs
    if mesh.pp == 1:
        return ((none,) * len(runs),), ((none,) * len(runs),)
    senders = (0,) if coster.topology.is_uniform else tuple(range(mesh.pp))
    tables: list[Cuts] = []
    for name in ("inside", "after"):
        rows = []
        for sender in senders:
            sends = sender < mesh.pp - 1 or candidate.schedule.chunks > 1
            rows.append(tuple(
                coster.cut(crossing, candidate, sender)
                if sends and (crossing := getattr(run, name)) is not None else none
                for run in runs))
        tables.append(tuple(rows) * (mesh.pp if len(senders) == 1 else 1))
    return tables[0], tables[1]


def least_receive(coster: Coster, candidate: Candidate) -> tuple[float, float]:
    """Least seconds that any cut costs forward and backward."""
    key = (candidate.mesh, candidate.micro_batch, candidate.schedule.chunks > 1)
    if key not in coster.receive_cache:
        tables = _cuts(coster, candidate)
        last = candidate.mesh.pp - (candidate.schedule.chunks == 1)
        cuts = [cost for name, rows in zip(("inside", "after"), tables, strict=True)
                for row in {id(row): row for row in rows[:last]}.values()
                for run, cost in zip(coster.chain.runs, row, strict=True)
                if getattr(run, name) is not None]
        coster.receive_cache[key] = (min(c.forward_s for c in cuts),
                                     min(c.backward_s for c in cuts))
    return coster.receive_cache[key]
