"""One scenario from its links to its score: bed, profile, plan, run, compare."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hand_tuned.beds import Bed, bed_of, checked
from benchmarks.hand_tuned.entrants import Field, make_field
from benchmarks.hand_tuned.paper import degrees
from benchmarks.hand_tuned.scenarios import Scenario, device_name, topology_of
from benchmarks.hand_tuned.score import score
from benchmarks.testbed import Result
from profiler.documents import dump, load, to_data, write_atomically
from profiler.layer_graph import LayerGraph
from profiler.models import resolve

__all__ = ["FULL", "QUICK", "Files", "Pace", "rows_of", "run_scenario"]

COLLECTIVES = "all-reduce,all-gather,reduce-scatter,send"
"""What the layouts here use: no expert is exchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How thoroughly: of the profile (error, seconds a case), the links, and the turns."""

    error: float = 0.02
    case_s: float = 0.3
    least: int = 3
    link_sizes: tuple[int, ...] = (2**12, 2**17, 2**21)
    link_s: float = 0.25
    link_repeats: int = 8
    num_random: int = 2
    turns: int = 2
    final_turns: int = 4
    timeout_s: float = 600.0


FULL = Pace()
QUICK = Pace(error=0.1, case_s=0.1, least=1, link_sizes=(2**12, 2**20), link_s=0.1, link_repeats=5,
             num_random=2, turns=2, final_turns=2, timeout_s=1200.0)


def run_scenario(scenario: Scenario, folder: Path, pace: Pace, *, limited: bool = True,
                 seed: int = 0, only_plan: bool = False) -> dict[str, Any]:
    """Everything about one scenario as plain data; its layouts are left in the folder.

    only_plan: nobody runs but the plan.

    Raises:
        Unavailable: this machine cannot be a test bed. JobFailed: profiling or the contest ended.
    """
    files = Files.of(scenario, folder)
    spent: dict[str, float] = {}
    if not files.graph.exists():
        with _timed(spent, "trace_s"):
            graph = resolve(f"benchmarks.hand_tuned.models:{scenario.model}")
            write_atomically(files.graph, dump(graph, indent=None))
    while True:
        with bed_of(scenario, limited) as bed, _Workers(bed, scenario, files, pace) as workers:
            with _timed(spent, "measure_s"):
                workers.wait_until_measured()
            with _timed(spent, "plan_s"):
                field = _planned(scenario, files, pace, seed, only_plan)
            order = field.entrants[0].layout.mesh.host_groups
            if order in ((), tuple(range(len(order)))):
                with _timed(spent, "run_s"):
                    measured = workers.compete(field)
                break
        # the executor numbers ranks as torchrun does: start the hosts in the order of the plan
        scenario = replace(scenario, hosts=tuple(scenario.hosts[i] for i in order))
    rows = rows_of(field, measured)
    return {"name": scenario.name, "why": scenario.why, "scenario": to_data(scenario),
            "limited": limited, "seed": seed, "spent_s": spent, "rows": rows,
            "refused": [list(pair) for pair in field.refused], "score": asdict(score(rows))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where a scenario's documents lie; scenarios of the same work and load share measurements."""

    place: Path
    graph: Path
    profile: Path
    links: Path

    @classmethod
    def of(cls, scenario: Scenario, folder: Path) -> Files:
        place = folder / scenario.slug
        place.mkdir(parents=True, exist_ok=True)
        load = [[device_name(scenario, i), host.core_share, host.count if not scenario.is_uniform
                 else scenario.num_processes] for i, host in enumerate(scenario.hosts)]
        if scenario.is_uniform:  # one machine carries all, however they are grouped
            load = load[:1]
        work = [scenario.model, scenario.micro_batches(), scenario.degrees()]
        hosts = [to_data(host) for host in scenario.hosts]
        return cls(place=place, graph=folder / f"graph-{scenario.model}.json",
                   profile=folder / f"profile-{_digest([work, sorted(load)])}.json",
                   links=folder / f"links-{_digest([hosts, scenario.link_gbit_per_s])}.json")


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]


def _planned(scenario: Scenario, files: Files, pace: Pace, seed: int, only_plan: bool) -> Field:
    topology = files.place / "topology.json"
    write_atomically(topology, dump(topology_of(scenario)))
    request = {"global_batch": scenario.global_batch, "seq_len": scenario.seq_len,
               "precision": "fp32"}
    return make_field(str(files.profile), str(topology),
                      str(files.links) if scenario.num_processes > 1 else None, request,
                      num_random=pace.num_random, seed=seed, only_plan=only_plan)


class _Workers:
    """The processes of one scenario, from their first measurement to the end of the contest."""

    def __init__(self, bed: Bed, scenario: Scenario, files: Files, pace: Pace) -> None:
        self.bed, self.scenario, self.files, self.pace = bed, scenario, files, pace
        self.ready, self.job = files.place / "ready", files.place / "job.json"
        self.output = files.place / "measured.json"
        hosts = range(len(scenario.hosts))
        self.parts = ([files.profile] if scenario.is_uniform else
                      [files.profile.with_suffix(f".{i}.json") for i in hosts])
        self.result: Result | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Workers:
        for stale in (self.ready, self.job, self.output):
            stale.unlink(missing_ok=True)
        before = self.files.place / "before.json"
        write_atomically(before, json.dumps({
            "model": [] if self.files.profile.exists() else self._model_arguments(),
            "outputs": [str(part) for part in self.parts],
            "device_names": [device_name(self.scenario, i)
                             for i in range(len(self.scenario.hosts))],
            "links": [] if self.files.links.exists() or self.scenario.num_processes == 1
            else self._links_arguments(),
            "ready": str(self.ready), "job": str(self.job)}))
        self.arguments = ["-m", "benchmarks.hand_tuned.worker", str(before)]
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bed.stop()
        self.thread.join()

    def _run(self) -> None:
        self.result = self.bed.torchrun(self.arguments, timeout_s=self.pace.timeout_s)

    def _model_arguments(self) -> list[str]:
        scenario, pace = self.scenario, self.pace
        return ["model", str(self.files.graph),
                "--micro-batch", ",".join(map(str, scenario.micro_batches())),
                "--tensor-parallel", ",".join(map(str, scenario.degrees())),
                *(["--seq-len", str(scenario.seq_len)] if scenario.seq_len > 1 else []),
                "--threads", "1", "--device", "cpu", "--error", str(pace.error),
                "--most-seconds", str(pace.case_s), "--least-repeats", str(pace.least),
                "--no-memory", "--restart", "--quiet"]

    def _links_arguments(self) -> list[str]:
        pace = self.pace
        return ["links", "--device", "cpu", "--sizes", ",".join(map(str, pace.link_sizes)),
                "--most-seconds", str(pace.link_s), "--repeats", str(pace.link_repeats),
                "--collectives", COLLECTIVES,
                "--quiet", "-o", str(self.files.links)]

    def wait_until_measured(self) -> None:
        """Until the model and the links are measured."""
        while self.thread.is_alive() and not self.ready.exists():
            time.sleep(0.05)
        if not self.ready.exists():
            assert self.result is not None
            raise checked(self.result, "measuring")
        graphs = [load(LayerGraph, part) for part in self.parts if part.exists()]
        if graphs:
            # without what a process holds before it has a model: caps are beyond that
            profiles = {graph.profiles[-1].device: replace(graph.profiles[-1], context_bytes=0)
                        for graph in graphs}
            write_atomically(self.files.profile, dump(
                replace(graphs[0], profiles=tuple(profiles.values())), indent=None))

    def compete(self, field: Field) -> dict[str, Any]:
        """Let every entrant run; what was measured."""
        names = []
        for index, entrant in enumerate(field.entrants):
            file = self.files.place / f"layout-{index}.json"
            # without the prediction: the executor would compare it with this host's memory
            write_atomically(file, dump(replace(entrant.layout, prediction=None, proof=None,
                                                alternatives=(), notes=(), links=None)))
            names.append(str(file))
        cap = self.scenario.memory_mib
        write_atomically(self.job, json.dumps({
            "model": self.scenario.model, "layouts": names, "output": str(self.output),
            "turns": self.pace.turns, "final_turns": self.pace.final_turns,
            "memory_bytes": None if cap is None else cap * 2**20}))
        while self.thread.is_alive():
            self.thread.join(0.2)
        assert self.result is not None
        if not self.result.ok:
            raise checked(self.result, "the contest")
        found: dict[str, Any] = json.loads(self.output.read_text())
        return found


def rows_of(field: Field, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each entrant, the plan first: predicted beside measured."""
    rows = []
    for index, entrant in enumerate(field.entrants):
        key, layout = str(index), entrant.layout
        prediction = layout.prediction
        assert prediction is not None
        turns, final = measured["seconds"].get(key, []), measured["final"].get(key, [])
        fullest = max(prediction.stages, key=lambda stage: stage.total_memory_bytes)
        rows.append({
            "names": list(entrant.names), "kind": entrant.kind, "degrees": degrees(layout),
            "layout": to_data(replace(layout, prediction=None, proof=None, alternatives=())),
            "predicted_s": prediction.step_s, "predicted_terms_s": dict(prediction.step_terms_s),
            "predicted_memory_bytes": fullest.total_memory_bytes,
            "predicted_memory_terms_bytes": dict(fullest.memory_bytes),
            "measured_share": prediction.measured_share,
            "turns_s": turns, "final_s": final,
            "measured_s": median(turns + final) if turns else None,
            "problem": measured["problems"].get(key, ""),
            "peak_bytes": measured["peak_bytes"].get(key),
            "micro_batch_s": measured["micro_batch_s"].get(key),
            "cpu_s": measured["cpu_s"].get(key)})
    return rows


class _timed:
    """Adds the seconds of a block to a record."""

    def __init__(self, into: dict[str, float], name: str) -> None:
        self.into, self.name, self.begin = into, name, 0.0

    def __enter__(self) -> None:
        self.begin = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.into[self.name] = self.into.get(self.name, 0.0) + time.monotonic() - self.begin
