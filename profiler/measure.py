"""From a LayerGraph to the same with a Profile: every distinct layer measured once a size.

Sizes are micro-batches x sequence lengths x tensor-parallel degrees. Each finished case is handed
to `save`, so that a long measurement can be interrupted and go on from there.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.utils import _pytree as pytree

from profiler.building import Subject, materialise
from profiler.capture import Call, Calls, capture, time_frame, time_outside
from profiler.layer_graph import LayerGraph, LayerKind
from profiler.measure_layers import MODES, Work, work_bytes, work_seconds
from profiler.profile import Failure, FrameSeconds, LayerBytes, LayerSeconds, Profile
from profiler.shards import CannotDivide, Emulation, HeldWhole, divided, local_arguments
from profiler.team import PeerFailed, Team
from profiler.timing import Budget, Clock, Samples, spread

__all__ = ["Case", "Measurement", "available_bytes", "cases_of"]

MEMINFO = Path("/proc/meminfo")
OUTSIDE_REPEATS = 7
OUTSIDE_SHARE = 0.02
"""Work outside layers that cannot be divided counts for nothing below this share of the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One size."""

    micro_batch: int
    seq_len: int
    tensor_parallel: int = 1

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch}, length {self.seq_len}, tp {self.tensor_parallel}"


def available_bytes(device: torch.device, num_processes: int) -> int:
    """Memory that this process may still use."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return 2**62
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] * 1024 // num_processes if found else 2**62


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError, PeerFailed)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


@dataclass(slots=True)
class Measurement:
    """A measurement under way.

    done: what has been measured so far. compile: run each layer through torch.compile.
    modes: of recompute; "none" is among them.
    save: is handed the profile after each case. advance: is told what is done next.
    """

    subject: Subject
    team: Team
    budget: Budget
    done: Profile
    save: Callable[[Profile], None]
    advance: Callable[[str], None]
    compile: bool = False
    with_memory: bool = True
    timer: Callable[[], float] = time.perf_counter
    modes: tuple[str, ...] = MODES
    outside_error: str = ""

    @property
    def graph(self) -> LayerGraph:
        return self.subject.graph

    def run(self, cases: list[Case]) -> Profile:
        """Measure every case that is not done yet."""
        groups: dict[tuple[int, int], list[Case]] = {}
        for case in cases:
            groups.setdefault((case.seq_len, case.micro_batch), []).append(case)
        for (seq_len, micro_batch), members in sorted(groups.items()):
            if all(self._missing(case) == set() for case in members):
                for case in members:
                    self._skip(case)
                continue
            try:
                calls = capture(self.subject, micro_batch, seq_len)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                for case in members:
                    self._fail(case, self._missing(case), "out_of_memory", str(error))
                    self._skip(case)
                continue
            for case in members:
                self._case(case, calls)
        return self.done

    def _missing(self, case: Case) -> set[str]:
        """Kinds of which this case holds nothing yet."""
        known = self.done.known(case.micro_batch, case.seq_len, case.tensor_parallel)
        return {name for name, kind in self.graph.kinds.items() if name not in known
                and (case.tensor_parallel == 1 or _is_divided(kind))}

    def _skip(self, case: Case) -> None:
        for kind in self.graph.kinds:
            self.advance(f"{kind}, {case}")

    def _fail(self, case: Case, kinds: set[str], reason: Any, note: str) -> None:
        text = " ".join(note.split())[:1000]
        self.done = replace(self.done, failures=(*self.done.failures, *(
            Failure(kind=kind, micro_batch=case.micro_batch, seq_len=case.seq_len,
                    tensor_parallel=case.tensor_parallel, reason=reason, note=text)
            for kind in sorted(kinds))))
        self.save(self.done)

    def _case(self, case: Case, calls: Calls) -> None:
        missing = self._missing(case)
        if not missing:
            self._skip(case)
            return
        group = Emulation(case.tensor_parallel, case.seq_len)
        results = functools.cache(lambda: self._results(calls, group))
        outside = self._outside(case, results, group)
        self._frame(case, results, group)
        for number, call in enumerate(calls.distinct):
            layers = [i for i, n in calls.of_layer.items() if n == number]
            kinds = {self.graph.layers[i].kind for i in layers} & missing
            self.advance(f"{', '.join(sorted(kinds)) or 'done'}, {case}")
            missing -= kinds
            if kinds:
                self._call(case, call, kinds, group, outside)
        self._fail(case, missing, "unsupported", "no layer of this kind was called")

    # ---- one call

    def _call(self, case: Case, call: Call, kinds: set[str], group: Emulation,
              outside: dict[str, tuple[float, float]] | None) -> None:
        first = sorted(kinds)[0]
        kind = self.graph.kinds[first]
        needed = _needed_bytes(kind, case, self.subject.dtype.itemsize)
        have = available_bytes(self.subject.device, self.team.per_host)
        if not self.team.all_true(needed < have):
            self._fail(case, kinds, "out_of_memory",
                       f"about {needed:,} bytes are needed, {have:,} are available")
            return
        try:
            work = self._work(call, kind, group)
            clock = self._clock()
            try:
                samples, settled = work_seconds(work, clock, self.budget, self.team.agree,
                                                self.modes)
            except PeerFailed:
                raise
            except Exception:
                self.team.fail()
                raise
            memory = work_bytes(work, self.subject.device) if self.with_memory else None
        except HeldWhole:
            self._as_degree_one(case, kinds)
            return
        except CannotDivide as error:
            self._fail(case, kinds, "unsupported", str(error))
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._fail(case, kinds, "out_of_memory", str(error))
            return
        samples, slowest = self.team.together(samples)
        wait_s = None
        if self.team.size > 1 and clock.is_aligned:
            wait_s = max(0.0, mean(slowest.parts["wall"]) - sum(
                mean(samples.parts[part]) for part in ("forward", "backward")))
        for name in sorted(kinds):
            self._add(case, name, samples, settled, outside, memory, wait_s)
        self.save(self.done)

    def _clock(self) -> Clock:
        return Clock(self.subject.device, self.timer, self.team.align)

    def _as_degree_one(self, case: Case, kinds: set[str]) -> None:
        """Rows of layers that every rank holds whole."""
        key = (case.micro_batch, case.seq_len, 1)

        def copies(rows: Any) -> list[Any]:
            return [replace(row, tensor_parallel=case.tensor_parallel) for row in rows
                    if row.kind in kinds and (
                        row.micro_batch, row.seq_len, row.tensor_parallel) == key]
        self.done = replace(self.done, layers=(*self.done.layers, *copies(self.done.layers)),
                            memory=(*self.done.memory, *copies(self.done.memory)))
        self.save(self.done)

    def _work(self, call: Call, kind: LayerKind, group: Emulation) -> Work:
        device = self.subject.device
        if group.degree == 1:
            real = materialise(call.module, device)
            make: Callable[[], tuple[Any, Any]] = call.fresh_arguments
        else:
            real = divided(call.module, kind, group, device, plain=self.compile)

            def make() -> tuple[Any, Any]:
                return local_arguments(*call.fresh_arguments(), group)
        forward: Callable[..., Any] = torch.compile(real) if self.compile else real
        return Work(real, make, forward)

    def _add(self, case: Case, kind: str, samples: Samples, settled: bool,
             outside: dict[str, tuple[float, float]] | None, memory: Any,
             wait_s: float | None) -> None:
        more = (0.0, 0.0) if outside is None else outside.get(kind, (0.0, 0.0))
        selective, full = (
            samples.difference(part, "backward") if part in samples.parts else 0.0
            for part in ("backward_selective", "backward_full"))
        more_s = self.team.mean(more)
        where: Any = {"kind": kind, "micro_batch": case.micro_batch, "seq_len": case.seq_len,
                 "tensor_parallel": case.tensor_parallel}
        if outside is None and self._outside_matters(case, kind):
            self._fail(case, {kind}, "unsupported",
                       "the work outside of layers cannot be divided: " + self.outside_error)
            return
        row = LayerSeconds(
            **where, forward_s=samples.median("forward") + more_s[0],
            backward_s=samples.median("backward") + more_s[1],
            recompute_selective_s=selective, recompute_full_s=full, outside_s=sum(more_s),
            accumulate_s=samples.median("accumulate"), wait_s=wait_s,
            spread=spread(samples.total(("forward", "backward"))),
            num_repeats=len(samples.parts["forward"]), settled=settled)
        found = self.done.memory
        if memory is not None:
            found = (*found, LayerBytes(
                **where, saved=tuple(memory.saved), kept_bytes=max(0, memory.kept["none"]),
                kept_selective_bytes=max(0, memory.kept["selective"]),
                kept_full_bytes=max(0, memory.kept["full"]),
                forward_peak_bytes=max(0, memory.forward_peak_bytes),
                backward_peak_bytes=max(0, memory.backward_peak_bytes)))
        self.done = replace(self.done, layers=(*self.done.layers, row), memory=found)

    # ---- the work outside of layers

    def _outside(self, case: Case, results: Callable[[], dict[int, Any]], group: Emulation
                 ) -> dict[str, tuple[float, float]] | None:
        """(forward, backward) seconds by kind; None where it cannot be divided."""
        clock = self._clock()
        try:
            samples = time_outside(
                self.subject, case.micro_batch, case.seq_len, results(), clock,
                OUTSIDE_REPEATS, degree=group.degree,
                bound=_local_vocabulary(self.graph, group.degree))
            works = True
        except Exception as error:  # whatever a model does with a part of its sequence
            if group.degree == 1:
                raise
            self.outside_error = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            works = False
        if not self.team.all_true(works):
            return None
        found: dict[str, list[tuple[float, float]]] = {}
        for layer, parts in samples.items():
            found.setdefault(self.graph.layers[layer].kind, []).append(
                (parts.median("forward"), parts.median("backward")))
        return {kind: _middle(rows) for kind, rows in found.items()}

    def _frame(self, case: Case, results: Callable[[], dict[int, Any]], group: Emulation
               ) -> None:
        """The forward before a stage's own layers, where the model can be cut."""
        size = {"micro_batch": case.micro_batch, "seq_len": case.seq_len,
                "tensor_parallel": case.tensor_parallel}
        clock = self._clock()
        if not clock.is_aligned or any(
                all(getattr(row, name) == value for name, value in size.items())
                for row in self.done.frames):
            return
        samples = None
        with contextlib.suppress(Exception):  # whatever a model does with what is not there
            samples = time_frame(
                self.subject, case.micro_batch, case.seq_len, results(), clock,
                OUTSIDE_REPEATS, degree=group.degree,
                bound=_local_vocabulary(self.graph, group.degree))
        if self.team.all_true(samples is not None) and samples is not None:
            seconds = self.team.mean([samples.median("forward")])[0]
            self.done = replace(self.done, frames=(
                *self.done.frames, FrameSeconds(**size, forward_s=seconds)))

    def _results(self, calls: Calls, group: Emulation) -> dict[int, Any]:
        """What each layer returns to one rank."""
        found = self._distinct_results(calls, group)
        return {layer: found[number] for layer, number in calls.of_layer.items()}

    def _distinct_results(self, calls: Calls, group: Emulation) -> dict[int, Any]:
        results: dict[int, Any] = {}
        if group.degree == 1:
            return {number: call.result for number, call in enumerate(calls.distinct)}
        for number, call in enumerate(calls.distinct):
            kind = self.graph.kind_of(call.layer)
            try:
                work = self._work(call, kind, group)
            except CannotDivide:
                results[number] = pytree.tree_map(functools.partial(_narrowed, group), call.result)
                continue
            args, kwargs = work.make_arguments()
            out = work.module(*args, **kwargs)
            results[number] = pytree.tree_map(
                lambda t: t.detach().requires_grad_(t.requires_grad)
                if isinstance(t, torch.Tensor) else t, out)
        return results

    def _outside_matters(self, case: Case, kind: str) -> bool:
        """Judged by degree 1: without that, it is not known."""
        for row in self.done.layers:
            if (row.kind, row.micro_batch, row.seq_len, row.tensor_parallel) == (
                    kind, case.micro_batch, case.seq_len, 1):
                return row.outside_s > OUTSIDE_SHARE * (row.forward_s + row.backward_s)
        return True


def _is_divided(kind: LayerKind) -> bool:
    """Whether a rank of a tensor-parallel group does less than the whole of it."""
    return any(op.split != "replicated" for op in kind.ops)


def _narrowed(group: Emulation, value: Any) -> Any:
    """A whole result as a shard of the sequence."""
    if (isinstance(value, torch.Tensor) and value.dim() > 1 and value.requires_grad
            and value.shape[1] == group.seq_len):
        return value.detach().narrow(1, 0, group.seq_len // group.degree).requires_grad_()
    return value


def _middle(rows: list[tuple[float, float]]) -> tuple[float, float]:
    """The row of median sum."""
    return sorted(rows, key=sum)[len(rows) // 2]


def _local_vocabulary(graph: LayerGraph, degree: int) -> int | None:
    if degree == 1:
        return None
    sizes = [kind.tensor_parallel.divides["vocabulary"] for kind in graph.kinds.values()
             if kind.tensor_parallel and "vocabulary" in kind.tensor_parallel.divides]
    return -(-min(sizes) // degree) if sizes else None


def _needed_bytes(kind: LayerKind, case: Case, itemsize: int) -> int:
    """What the LayerGraph says of parameters, gradients, saved and working bytes, undivided."""
    b, s = case.micro_batch, case.seq_len
    groups = (*kind.saved, *kind.backward_working_set)
    whole = (2 * kind.num_parameters * itemsize
             + sum(group.bytes_at(b, s, itemsize) for group in groups))
    return 2 * whole // case.tensor_parallel


def cases_of(micro_batches: tuple[int, ...], seq_lens: tuple[int, ...],
             degrees: tuple[int, ...]) -> Iterator[Case]:
    """All sizes; degree 1 first, the sharded ones are judged by it."""
    for seq_len in seq_lens:
        for micro_batch in micro_batches:
            for degree in sorted({1, *degrees}):
                yield Case(micro_batch=micro_batch, seq_len=seq_len, tensor_parallel=degree)
