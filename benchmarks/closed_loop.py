"""Profile, plan, run: predicted against measured step time of many layouts, on CPU processes.

    torchrun --nproc-per-node 2 benchmarks/closed_loop.py [--rounds 8] [--json FILE]
    torchrun --nproc-per-node 4 benchmarks/closed_loop.py

All processes profile at once, as many as the run has. Links are measured first. Then short rounds
of profiling and one step of every layout alternate, so that what slows the machine for some seconds
slows both, and medians over the rounds are compared. Every process is pinned to a core, and a
companion uses what it leaves of its share of it (benchmarks/companion.py), so that no process is
faster while another waits; more processes than cores have equal shares of them. For tensor
parallelism alone the rank's compute is compared as well: the step less the time within collectives.
Goals: a mean absolute error of 15 %, a rank correlation of 0.9, compute of shards within 10 %.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.companion import Companion, pin
from benchmarks.published.score import spearman
from executor import collectives
from executor.losses import cross_entropy
from executor.models import build_module
from executor.optimizers import make_optimizer
from executor.parallelize import parallelize
from planner.capabilities import RecomputeMode
from planner.layout import Choice, LayerRun, Layout, Mesh, Reference, Schedule, Stage
from planner.link_fits import with_links
from planner.pricing import price
from planner.request import Request
from planner.topology_local import local_topology
from profiler.allocator import keep_freed_memory
from profiler.building import build_subject
from profiler.documents import write_atomically
from profiler.hardware import hardware_name, today, versions
from profiler.hugging_face import trace_hugging_face
from profiler.layer_graph import LayerGraph
from profiler.links import Links
from profiler.measure import Measurement, available_bytes, cases_of
from profiler.measure_links import LinkOptions, measure_links
from profiler.measure_update import update_seconds
from profiler.profile import Profile
from profiler.team import Team
from profiler.timing import Budget

CPU = torch.device("cpu")
SEQ_LEN, BATCH = 64, 8

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 6,
              "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1376,
              "vocab_size": 8192, "max_position_embeddings": 512, "use_cache": False},
    "gpt2": {"model_type": "gpt2", "n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 8192,
             "n_positions": 512, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout in short: its mesh, micro-batch and number of equal pieces."""

    name: str
    mesh: Mesh
    micro_batch: int
    recompute: RecomputeMode = "none"


def plans(world: int) -> list[Plan]:
    """Every way alone, with a large, a middle and the smallest micro-batch; recompute of all; and
    on four processes their mixtures."""
    each = BATCH // world
    ways = [("dp", Mesh(dp_replicate=world), (each, each // 2, 1)),
            ("fsdp", Mesh(dp_shard=world), (each, each // 2, 1)),
            ("tp", Mesh(tp=world), (BATCH // 2, 1)),
            ("pp", Mesh(pp=world), (BATCH, BATCH // 4, 1))]
    if world == 4:
        ways += [("dp 2 x tp 2", Mesh(dp_replicate=2, tp=2), (2,)),
                 ("fsdp 2 x tp 2", Mesh(dp_shard=2, tp=2), (2,)),
                 ("pp 2 x dp 2", Mesh(pp=2, dp_replicate=2), (2,)),
                 ("pp 2 x tp 2", Mesh(pp=2, tp=2), (2,)),
                 ("hsdp 2 x 2", Mesh(dp_replicate=2, dp_shard=2), (2,))]
    found = [Plan(f"{way}, micro-batch {size}", mesh, size)
             for way, mesh, sizes in ways for size in sorted(set(sizes), reverse=True) if size]
    return [*found, Plan("fsdp, full recompute", Mesh(dp_shard=world), each, "full"),
            Plan("pp, full recompute", Mesh(pp=world), BATCH // 4, "full")]


def layout_of(graph: LayerGraph, plan: Plan) -> Layout:
    count, pp = len(graph.layers), plan.mesh.pp
    cuts = [round(k * count / pp) for k in range(pp + 1)]
    tied = {layer for tie in graph.ties for layer, _ in tie.places}

    def stage(first: int, last: int) -> Stage:
        return Stage(runs=tuple(
            LayerRun(first_layer=i, num_layers=1,
                     choice=Choice(recompute=plan.recompute,
                                   reshard=plan.mesh.dp_shard > 1 and i not in tied))
            for i in range(first, last)))

    micro_batches = BATCH // (plan.micro_batch * plan.mesh.dp)
    return Layout(
        model=Reference(name=graph.name), topology=Reference(name="local"), mesh=plan.mesh,
        request=Request(global_batch=BATCH, seq_len=SEQ_LEN, precision="fp32"),
        micro_batch=plan.micro_batch, num_micro_batches=micro_batches,
        schedule=Schedule(name="1f1b" if micro_batches >= pp else "gpipe"),
        stages=tuple(stage(a, b) for a, b in pairwise(cuts)))


@dataclass(slots=True)
class Timed:
    """Seconds within the collectives of tensor parallelism, of this rank."""

    timer: Callable[[], float]
    seconds: float = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Both of sequence parallelism, and the waits of DTensor's (norms' gradients, the loss)."""
        originals = collectives._gather, collectives._reduce_scatter, functional.wait_tensor

        def timed(function: Any) -> Any:
            def call(*args: Any) -> Any:
                begin = self.timer()
                result = function(*args)
                self.seconds += self.timer() - begin
                return result
            return call

        collectives._gather, collectives._reduce_scatter, functional.wait_tensor = map(
            timed, originals)
        try:
            yield
        finally:
            (collectives._gather, collectives._reduce_scatter,
             functional.wait_tensor) = originals


@dataclass(slots=True)
class Row:
    name: str
    predicted_s: list[float] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    predicted_compute_s: list[float] = field(default_factory=list)
    measured_compute_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Runner:
    """A layout, ready to take steps."""

    run: Any
    inputs: Any
    targets: Any

    @classmethod
    def make(cls, graph: LayerGraph, plan: Plan) -> Runner:
        layout = layout_of(graph, plan)
        run = parallelize(build_module(graph, 0), layout, loss=cross_entropy(),
                          graph=graph, max_norm=1.0, device_type="cpu",
                          optimizer=make_optimizer(layout.request, 1e-4, 0.01))
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(8192, (BATCH, SEQ_LEN + 1), generator=generator)
        made = cls(run, {"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous())
        run.step(made.inputs, made.targets)  # states of the optimizer are made
        return made

    def step(self, timer: Callable[[], float]) -> tuple[float, float]:
        """Seconds of one step, and of it less tensor parallelism's collectives: of all ranks the
        first is the slowest one's, the second their mean, by what layers are timed with."""
        timed = Timed(timer)
        dist.barrier()
        begin, first = time.perf_counter(), timer()
        with timed.watching():
            self.run.step(self.inputs, self.targets)
        own = timer() - first
        dist.barrier()
        return time.perf_counter() - begin, Team.join().mean([own - timed.seconds])[0]


def profiled(graph: LayerGraph, layouts: list[Plan], team: Team, timer: Callable[[], float]
             ) -> LayerGraph:
    """The graph with the seconds of one round: everything once, after a warm-up."""
    empty = Profile(device="cpu", dtype="float32", hardware=hardware_name(CPU),
                    versions=versions(CPU), date=today(), num_processes=team.size)
    budget = Budget(warm_up=1, least=1, most=1)
    measurement = Measurement(
        subject=build_subject(graph, CPU, torch.float32), team=team, budget=budget, done=empty,
        save=lambda profile: None, advance=lambda text: None, with_memory=False,
        modes=("none", "full"), timer=timer)
    profile = empty
    for degree in sorted({plan.mesh.tp for plan in layouts}):
        sizes = tuple(sorted({p.micro_batch for p in layouts if p.mesh.tp == degree}))
        profile = measurement.run(list(cases_of(sizes, (SEQ_LEN,), (degree,))))
    update = update_seconds(graph, CPU, "float32", "adamw", available_bytes(CPU, team.size) // 2,
                            budget, team, timer)
    return replace(graph, profiles=(replace(profile, updates=(update,)),))


def predict(graph: LayerGraph, links: Links, plan: Plan) -> tuple[float, float]:
    """(step, step less collectives of tensor parallelism) of the planner."""
    topology = with_links(local_topology(dist.get_world_size()), links)
    prediction = price(graph, topology, layout_of(graph, plan)).prediction
    assert prediction is not None
    exchanged = prediction.step_terms_s.get("tensor_parallel_collectives", 0.0)
    return prediction.step_s, prediction.step_s - exchanged


def contest(name: str, options: argparse.Namespace) -> list[Row]:
    team = Team.join()
    holder: list[Any] = [trace_hugging_face(MODELS[name], name=name) if team.rank == 0 else None]
    dist.broadcast_object_list(holder)
    graph = holder[0]
    layouts = [p for p in plans(team.size) if not options.only or p.name in options.only]
    rows = [Row(plan.name) for plan in layouts]
    runners = [Runner.make(graph, plan) for plan in layouts]
    gc.collect()
    gc.freeze()  # a collection would look through every runner, in the step of any
    links = measure_links(LinkOptions(
        most_bytes=2**25, most_s=1.0, repeats=20, device="cpu",
        collectives=("all_reduce", "all_gather", "reduce_scatter", "send")))
    for number in range(options.rounds):
        timer = team.timer(CPU)
        measured = profiled(graph, layouts, team, timer)
        gc.collect()  # what profiling left is not the first step's
        entrants = list(zip(rows, layouts, runners, strict=True))
        for row, plan, runner in entrants if number % 2 == 0 else entrants[::-1]:
            step_s, compute_s = predict(measured, links, plan)
            row.predicted_s.append(step_s)
            whole, compute = runner.step(timer)
            row.measured_s.append(whole)
            if plan.mesh.tp == team.size:
                row.predicted_compute_s.append(compute_s)
                row.measured_compute_s.append(compute)
    return rows


def report(name: str, rows: list[Row]) -> dict[str, Any]:
    predicted = [median(row.predicted_s) for row in rows]
    measured = [median(row.measured_s) for row in rows]
    errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    print(f"\n{name:<26}{'predicted (s)':>15}{'measured (s)':>14}{'error':>9}")
    for row, p, m, error in zip(rows, predicted, measured, errors, strict=True):
        print(f"{row.name:<26}{p:>15.3f}{m:>14.3f}{error:>9.1%}")
        if row.measured_compute_s:
            p, m = median(row.predicted_compute_s), median(row.measured_compute_s)
            print(f"{'  compute of one rank':<26}{p:>15.3f}{m:>14.3f}{p / m - 1:>9.1%}")
    found = {"mape": mean(map(abs, errors)), "rank_correlation": spearman(
        predicted, measured)}
    print(f"mean absolute error {found['mape']:.1%}, rank correlation "
          f"{found['rank_correlation']:.2f}", flush=True)
    return found | {"rows": [
        {"layout": row.name, "predicted_s": p, "measured_s": m,
         "rounds": [list(pair) for pair in zip(row.predicted_s, row.measured_s, strict=True)],
         "compute_rounds": [list(pair) for pair in zip(
             row.predicted_compute_s, row.measured_compute_s, strict=True)]}
        for row, p, m in zip(rows, predicted, measured, strict=True)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--only", nargs="*", metavar="LAYOUT", help="of these names")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    pin(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    results = {}
    with Companion():
        for name in options.models:
            rows = contest(name, options)
            if dist.get_rank() == 0:
                results[name] = report(name, rows)
    if options.json and dist.get_rank() == 0:
        write_atomically(options.json, json.dumps({
            "hardware": hardware_name(CPU), "date": today(), "processes": dist.get_world_size(),
            "models": results}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
