"""One process of a contest: the same batch under every layout, in alternation.

    torchrun ... -m benchmarks.hand_tuned.worker before.json

First the model and the links are measured (`python -m profiler`), by the very processes that run
the layouts afterwards; then they wait for the job, which somebody plans meanwhile. A layout is
built once and kept; turn by turn each of them runs one step that is not counted and one between
two barriers (A, B, C, then C, B, A), so that a machine that is slower for a while is so for all.
Then the fastest meet again with the first (the plan), so that who is called best is not who had the
luckiest turns. What fails is agreed on by all ranks, reported, and the rest goes on.

With a memory cap every layout first runs alone, in a process forked for it that has all code
already and whose allocator keeps nothing back: what it holds may grow by the cap beyond what it is
without a model, and a layout of which any process held more at any moment has failed.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.companion import Companion, pin
from benchmarks.hand_tuned import models
from benchmarks.hand_tuned.children import in_child, join, load_code, run_alone
from executor import parallelize
from executor.deferred import Deferred
from executor.losses import Loss
from executor.models import build_deferred, make_loss
from executor.optimizers import make_optimizer
from planner.layout import Layout
from planner.models import resolve
from planner.pricing import candidate_of
from planner.search import describe
from profiler.allocator import keep_freed_memory
from profiler.documents import load, write_atomically
from profiler.layer_graph import LayerGraph

__all__ = ["Job", "measure"]

TIMEOUT_S = 600
MEASURE_S = 300.0
HOPELESS = 1.5
"""A layout this many times slower than the fastest gets one turn: more would decide nothing."""
HANG_S = {"cpu": 150.0, "cuda": 1800.0}
"""Seconds for one layout to be built and run, after which every rank says where it is and ends."""
FAR = 8.0
"""One whose first step takes this many times as long as another's first is not run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is measured. turns: of every layout; final_turns: of the plan and `finalists` others.

    keep: hold all layouts at once; else each is built anew for every turn (on accelerators, whose
    memory one layout fills).
    """

    layouts: tuple[str, ...]
    output: str
    model: str = ""
    turns: int = 2
    final_turns: int = 5
    finalists: int = 3
    keep: bool = True
    steps: int = 1
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What is measured before there is anything to run.

    model, links: arguments of `python -m profiler`; empty: not needed. outputs: of the model's, for
    each host (one: all hosts are alike, and their processes measure at once). ready: is written
    when it is done; job: appears when it is planned.
    """

    model: tuple[str, ...]
    outputs: tuple[str, ...]
    device_names: tuple[str, ...]
    links: tuple[str, ...]
    ready: str
    job: str


def main() -> None:
    data = json.loads(Path(sys.argv[1]).read_text())
    before = Before(**{name: tuple(value) if isinstance(value, list) else value
                       for name, value in data.items()})
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported need not be looked through again by every collection
    pin(int(os.environ["LOCAL_RANK"]))
    with Companion() as companion:
        if before.model:
            _measure("model", lambda: _profile(before))
        if before.links:
            _measure("links", lambda: _links(before.links))
        if int(os.environ["RANK"]) == 0:
            write_atomically(before.ready, "")
        with companion.paused():  # it is being planned
            while not Path(before.job).exists():
                time.sleep(0.1)
        compete(before.job)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads need not be waited for


def _measure(name: str, work: Callable[[], None]) -> None:
    _, problem = in_child(work, MEASURE_S)
    if problem:
        raise RuntimeError(f"measuring the {name}: {problem}")


def _profile(before: Before) -> None:
    """Profile the model: all processes as one team, or those of each host."""
    host = 0
    if len(before.outputs) > 1:
        host = int(os.environ["GROUP_RANK"])
        os.environ |= {"RANK": os.environ["LOCAL_RANK"],
                       "WORLD_SIZE": os.environ["LOCAL_WORLD_SIZE"]}
    if int(os.environ["WORLD_SIZE"]) > 1:
        join(f"model{host}", MEASURE_S)
    _profiler((*before.model, "--device-name", before.device_names[host],
               "-o", before.outputs[host]))


def _links(arguments: tuple[str, ...]) -> None:
    join("links", MEASURE_S)
    _profiler(arguments)


def _profiler(arguments: tuple[str, ...]) -> None:
    """`python -m profiler ...`, without starting Python again."""
    from profiler.__main__ import commands

    commands.main(args=list(arguments), prog_name="python -m profiler", standalone_mode=False)


def compete(path: str) -> None:
    """Run the layouts of a job."""
    data = json.loads(Path(path).read_text())
    job = Job(**{**data, "layouts": tuple(data["layouts"])})
    layouts = [load(Layout, file) for file in job.layouts]
    graph = resolve(layouts[0].model.name)
    batch = models.batch_of(job.model, layouts[0].request.global_batch)
    loss = functools.partial(make_loss, graph, None)
    peaks: dict[int, int] = {}
    problems: dict[int, str] = {}
    if job.memory_bytes is not None:
        build = _copies(graph)
        works = [functools.partial(_steps, build, layout, graph, batch, loss())
                 for layout in layouts]
        load_code(works[0])
        for index, work in enumerate(works):
            peak, problem = run_alone(index, work, job.memory_bytes)
            if peak is not None:
                peaks[index] = peak
            if problem:
                problems[index] = problem
    keep_freed_memory()  # as `profiler model` does; where there is a cap, nobody did before
    join("contest", TIMEOUT_S)
    measure(job, layouts, graph, batch, loss, "cpu", problems, peaks)


def _copies(graph: LayerGraph) -> Callable[[], Any]:
    """Models without weights: one is built by its own code, the others are copies of it."""
    first = build_deferred(graph, 0)
    if not isinstance(first, Deferred):
        return functools.partial(build_deferred, graph, 0)
    return lambda: replace(first, model=copy.deepcopy(first.model))


def _steps(build: Callable[[], Any], layout: Layout, graph: LayerGraph, batch: Any, loss: Loss
           ) -> None:
    """Two steps, by the end of which everything has been held once."""
    run = _build(build(), layout, graph, loss, "cpu")
    for _ in range(2):
        run.step(*batch)


def measure(job: Job, layouts: list[Layout], graph: LayerGraph, batch: Any,
            loss: Callable[[], Loss], device: str, problems: dict[int, str],
            peaks: dict[int, int]) -> None:
    """Time the layouts on the running processes; rank 0 writes what came out."""
    stable = _Stable(job, layouts, graph, batch, loss, device)
    stable.problems = {index: text for index in range(len(layouts))
                       if (text := _agreed(problems.get(index, "")))}
    first = stable.first_turn()
    if first:
        fastest = min(first.values())
        hopeless = {index for index, s in first.items() if s > HOPELESS * fastest}
        stable.seconds = {index: [seconds] for index, seconds in first.items()}
        for turn in range(1, job.turns):
            order = [i for i in first if i not in hopeless]
            stable.turn(order if turn % 2 == 0 else order[::-1], stable.seconds)
        ranked = sorted(stable.seconds, key=lambda i: sorted(stable.seconds[i])[
            len(stable.seconds[i]) // 2])
        finalists = [i for i in ranked if i != 0][:job.finalists]
        if 0 in stable.seconds:
            finalists = [0, *finalists]
        for turn in range(job.final_turns):
            stable.turn(finalists if turn % 2 == 0 else finalists[::-1], stable.final)
    if dist.get_rank() == 0:
        write_atomically(job.output, json.dumps({
            "seconds": stable.seconds, "final": stable.final, "problems": stable.problems,
            "peak_bytes": peaks, "micro_batch_s": stable.micro_batch_s,
            "cpu_s": stable.cpu_s}))
    dist.barrier()


class _Stable:
    """The layouts that run, built once or anew for each turn."""

    def __init__(self, job: Job, layouts: list[Layout], graph: LayerGraph, batch: Any,
                 loss: Callable[[], Loss], device: str) -> None:
        self.job, self.layouts, self.graph, self.batch = job, layouts, graph, batch
        self.loss, self.device = loss, device
        self.build = _copies(graph)
        self.begin = time.monotonic()
        self.runs: dict[int, Any] = {}
        self.first_s = 0.0
        self.problems: dict[int, str] = {}
        self.seconds: dict[int, list[float]] = {}
        self.final: dict[int, list[float]] = {}
        self.micro_batch_s: dict[int, list[float | None]] = {}
        self.cpu_s: dict[int, list[float | None]] = {}

    def first_turn(self) -> dict[int, float]:
        """Seconds of the second step of every layout; the first allocates and starts threads.

        Of one that is far slower than all before it in its first step, that step.
        """
        found: dict[int, float] = {}
        shortest = math.inf
        for index in range(len(self.layouts)):
            if index in self.problems:
                continue
            self._log(f"layout {index}: {describe(candidate_of(self.layouts[index]))}")
            problem, seconds = "", 0.0
            faulthandler.dump_traceback_later(HANG_S[self.device], exit=True)
            try:
                run = self._ready(index)
                seconds = _slowest(self.first_s)
                shortest = min(shortest, seconds)
                if seconds < FAR * shortest:
                    seconds = self._timed(run)
            except Exception as error:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            problem = _agreed(problem)
            faulthandler.cancel_dump_traceback_later()
            if problem:
                self.problems[index] = problem
                self._log(f"layout {index}: {problem}")
                self.runs.pop(index, None)
                continue
            found[index] = seconds
            self._log(f"layout {index}: {seconds:.3f} s")
            self._settle(index)
        return found

    def turn(self, order: list[int], into: dict[int, list[float]]) -> None:
        """One turn: each layout once."""
        for index in order:
            faulthandler.dump_traceback_later(HANG_S[self.device], exit=True)
            run = self._ready(index)
            if self.job.keep:
                run.step(*self.batch)  # since its last turn the caches have filled with others
            begin = time.process_time()
            into.setdefault(index, []).extend(self._timed(run) for _ in range(self.job.steps))
            self.cpu_s[index] = _gathered((time.process_time() - begin) / self.job.steps)
            self.micro_batch_s[index] = _gathered(run.clock.micro_batch_s())
            faulthandler.cancel_dump_traceback_later()
            self._settle(index)

    def _log(self, text: str) -> None:
        if dist.get_rank() == 0:
            with Path(f"{self.job.output}.log").open("a", encoding="utf-8") as log:
                log.write(f"{time.monotonic() - self.begin:7.1f} s  {text}\n")

    def _ready(self, index: int) -> Any:
        run = self.runs.get(index)
        if run is None:
            run = _build(self.build(), self.layouts[index], self.graph, self.loss(), self.device)
            begin = time.perf_counter()
            run.step(*self.batch)
            self.first_s = time.perf_counter() - begin
            run.clock.settle()
            run.clock.forget()
            self.runs[index] = run
            gc.collect()
            gc.freeze()  # else a step of one layout would look through all others
        return run

    def _settle(self, index: int) -> None:
        if self.job.keep:
            return
        run = self.runs.pop(index)
        groups = run.mesh.mesh.get_all_groups()
        del run
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        for group in groups:
            dist.destroy_process_group(group)

    def _timed(self, run: Any) -> float:
        """Seconds of one step, the same number on all ranks: they decide by it who runs next."""
        dist.barrier()
        start = time.perf_counter()
        run.step(*self.batch)
        if self.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        seconds = time.perf_counter() - start
        run.clock.settle()
        return _slowest(seconds)


def _build(model: Any, layout: Layout, graph: LayerGraph, loss: Loss, device: str) -> Any:
    return parallelize(model, layout, loss=loss, graph=graph, max_norm=1.0,
                       optimizer=make_optimizer(layout.request, 1e-4, 0.01), device_type=device)


def _slowest(seconds: float) -> float:
    """Of all ranks."""
    return max(value for value in _gathered(seconds) if value is not None)


def _gathered(value: float | None) -> list[float | None]:
    """What every rank says."""
    said: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


def _agreed(problem: str) -> str:
    """A problem of any rank, on all."""
    said: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(said, problem)
    return next((text for text in said if text), "")


if __name__ == "__main__":
    main()
