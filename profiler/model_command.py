"""`python -m profiler model`: from a model's name to its LayerGraph with a Profile."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from profiler import models
from profiler.allocator import keep_freed_memory
from profiler.building import build_subject
from profiler.documents import dump, load, write_atomically
from profiler.errors import Interrupted, InvalidInput
from profiler.hardware import (
    LoadWatch,
    context_bytes,
    device_name,
    hardware_name,
    pick_device,
    today,
    versions,
)
from profiler.layer_graph import LayerGraph
from profiler.measure import Measurement, available_bytes, cases_of
from profiler.measure_update import update_seconds
from profiler.profile import Profile
from profiler.team import Team
from profiler.timing import Budget

__all__ = ["ModelOptions", "profile_model", "progress_bar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What the command line asks for."""

    model: str
    output: str
    seq_lens: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = (1,)
    degrees: tuple[int, ...] = (1,)
    dtype: str = "float32"
    device: str | None = None
    device_name: str | None = None
    threads: int | None = None
    optimizers: tuple[str, ...] = ("adamw",)
    error: float = 0.01
    most_s: float = 20.0
    least: int = 5
    compile: bool = False
    memory: bool = True
    restart: bool = False
    quiet: bool = False


@contextlib.contextmanager
def progress_bar(quiet: bool, total: int) -> Iterator[Callable[[str], None]]:
    """A bar with the time left, on a terminal; a function that says what is done next."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with Progress(TextColumn("{task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn(),
                  TextColumn("{task.description}"), console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        started: list[str] = []

        def advance(text: str) -> None:
            progress.update(task, advance=1 if started else 0, description=text)
            started.append(text)
        yield advance


def profile_model(options: ModelOptions) -> LayerGraph:
    """Measure a model and write the document; every process that torchrun started takes part.

    Raises:
        InvalidInput: sizes that the model does not take, a partial file of another measurement.
        Interrupted: what was measured is kept, and the same command goes on from there.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    graph = models.resolve(options.model)
    seq_lens = _sizes(graph, options)
    device = pick_device(options.device)
    if device.type == "cpu":
        keep_freed_memory()  # as `executor train` does
    team = Team.join()
    partial = Path(f"{options.output}.partial")
    profile = Profile(
        device=options.device_name or device_name(device), dtype=options.dtype,
        hardware=hardware_name(device), versions=versions(device), date=today(),
        num_processes=team.per_host, num_threads=torch.get_num_threads(),
        compiled=options.compile, context_bytes=context_bytes(device))
    others: tuple[Profile, ...] = graph.profiles
    if partial.exists() and not options.restart:
        profile = _resumed(graph, profile, partial)
        _say(team, f"going on from {partial}: {len(profile.layers)} cases are measured already")

    def save(done: Profile) -> None:
        if team.rank == 0:
            write_atomically(partial, dump(replace(graph, profiles=(done,)), indent=None))

    watch = LoadWatch(device, team.per_host)
    watch.begin()
    cases = list(cases_of(options.micro_batches, seq_lens, options.degrees))
    budget = Budget(error=options.error, most_s=options.most_s, least=options.least,
                    warm_up=min(2, options.least - 1))
    timer = team.timer(device)
    try:
        with progress_bar(options.quiet or team.rank > 0,
                          len(cases) * len(graph.kinds) + 1) as advance:
            subject = build_subject(graph, device, getattr(torch, options.dtype))
            measurement = Measurement(
                subject=subject, team=team, budget=budget, done=profile, save=save,
                advance=advance, compile=options.compile, with_memory=options.memory,
                timer=timer)
            profile = measurement.run(cases)
            advance("optimizer step")
            profile = _with_updates(profile, graph, device, options, budget, team, timer)
    except KeyboardInterrupt:
        raise Interrupted(f"what was measured is in {partial}: the same command goes on from "
                          "there") from None
    profile = replace(profile, busy=(*profile.busy, *watch.end())[-100:])
    kept = tuple(p for p in others if _identity(p) != _identity(profile))
    done = replace(graph, profiles=(*kept, profile))
    if team.rank == 0:
        write_atomically(options.output, dump(done, indent=None))
        partial.unlink(missing_ok=True)
        for note in profile.busy:
            _say(team, f"note: {note}")
    team.leave()
    return done


def _say(team: Team, text: str) -> None:
    if team.rank == 0:
        print(text, file=sys.stderr, flush=True)


def _identity(profile: Profile) -> tuple[object, ...]:
    return (profile.device, profile.dtype, profile.hardware, profile.num_processes,
            profile.num_threads, profile.compiled)


def _sizes(graph: LayerGraph, options: ModelOptions) -> tuple[int, ...]:
    if graph.sample != "tokens":
        if any(length != 1 for length in options.seq_lens):
            raise InvalidInput(f"--seq-len: {graph.name} takes {graph.sample}, which have none")
        return (1,)
    if graph.fixed_seq_len is not None and not options.seq_lens:
        return (graph.fixed_seq_len,)
    if not options.seq_lens:
        raise InvalidInput(f"--seq-len is needed: a sample of {graph.name} is tokens")
    wrong = [f"--seq-len {length}: {graph.name} takes at most {graph.max_seq_len:,} tokens"
             for length in options.seq_lens if graph.max_seq_len and length > graph.max_seq_len]
    wrong += [f"--tensor-parallel {degree} does not divide --seq-len {length}"
              for degree in options.degrees for length in options.seq_lens if length % degree]
    if wrong:
        raise InvalidInput(wrong)
    return options.seq_lens


def _resumed(graph: LayerGraph, fresh: Profile, partial: Path) -> Profile:
    before = load(LayerGraph, partial)
    found = before.profiles[0] if before.profiles else fresh
    same = (_identity(found) == _identity(fresh) and found.versions == fresh.versions
            and replace(before, profiles=()) == replace(graph, profiles=()))
    if not same:
        raise InvalidInput(f"{partial} is of another measurement (model, device, dtype, load or "
                           "versions differ): give --restart to begin anew, or another output")
    return found


def _with_updates(profile: Profile, graph: LayerGraph, device: torch.device,
                  options: ModelOptions, budget: Budget, team: Team,
                  timer: Callable[[], float]) -> Profile:
    dtypes = ["float32"] + (["bfloat16"] if options.dtype == "bfloat16" else [])
    updates = list(profile.updates)
    known = {(u.optimizer, u.stored_dtype, u.fused) for u in updates}
    for case in product(options.optimizers, dtypes, (True, False)):
        if case in known:
            continue
        optimizer, dtype, fused = case
        available = available_bytes(device, team.per_host) // 2
        updates.append(update_seconds(graph, device, dtype, optimizer, available, budget, team,
                                      timer, fused=fused))
    return replace(profile, updates=tuple(updates))
