"""Is a step the sum of its profiled layers? Predicted against measured, in one process.

    python benchmarks/composition.py [--rounds 12] [--cpu-time] [--json FILE]

For each model and micro-batch, short rounds of profiling (every distinct layer once) alternate with
whole steps of the plain model, unsharded. A round's prediction is the layers' seconds as the
planner adds them up, with the optimizer and the gradient norm; it is compared with the mean of
the steps just before and just after it, so that what slows the machine for some seconds slows
both. The error is that of the median round. Goal: each within 8 %, the median within 4 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from planner.layout import LayerRun, Layout, Mesh, Reference, Stage
from planner.pricing import price
from planner.request import Request
from planner.topology_local import local_topology
from profiler.allocator import keep_freed_memory
from profiler.building import Subject, build_subject, materialise
from profiler.documents import write_atomically
from profiler.hardware import hardware_name, today, versions
from profiler.hugging_face import trace_hugging_face
from profiler.layer_graph import LayerGraph
from profiler.measure import Measurement, available_bytes, cases_of
from profiler.measure_update import make_optimizer, update_seconds
from profiler.profile import Profile
from profiler.team import Team
from profiler.timing import Budget

EACH, MEDIAN = 0.08, 0.04
Timer = Callable[[], float]
CPU = torch.device("cpu")

_SIZE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
_TEXT = {"vocab_size": 8192, "max_position_embeddings": 512}
MODELS: dict[str, tuple[dict[str, Any], int, tuple[int, int]]] = {
    "gpt2": ({"model_type": "gpt2", "n_layer": 4, "n_embd": 512, "n_head": 8,
              "vocab_size": 8192, "n_positions": 512}, 128, (1, 2)),
    "llama": ({"model_type": "llama", "num_key_value_heads": 4, "intermediate_size": 1376,
               **_SIZE, **_TEXT}, 128, (1, 2)),
    "bert": ({"model_type": "bert", "intermediate_size": 2048, **_SIZE, **_TEXT}, 128, (1, 2)),
    "vit": ({"model_type": "vit", "intermediate_size": 2048, "image_size": 160,
             "patch_size": 16, "num_labels": 1000, **_SIZE}, 1, (1, 2)),
    "resnet": ({"model_type": "resnet", "embedding_size": 64,
                "hidden_sizes": [256, 512, 1024, 2048], "depths": [2, 2, 3, 2],
                "layer_type": "bottleneck", "image_size": 128, "num_labels": 1000}, 1, (2, 4)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One model and micro-batch, round by round."""

    model: str
    micro_batch: int
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]

    @property
    def errors(self) -> list[float]:
        return [p / m - 1 for p, m in zip(self.predicted_s, self.measured_s, strict=True)]

    @property
    def error(self) -> float:
        return median(self.errors)

    def data(self) -> dict[str, Any]:
        return {"model": self.model, "micro_batch": self.micro_batch,
                "predicted_s": median(self.predicted_s), "measured_s": median(self.measured_s),
                "error": self.error, "errors_of_rounds": self.errors}


def profile_once(subject: Subject, micro_batch: int, seq_len: int, timer: Timer) -> Profile:
    """One round: every distinct layer and the update once, after one that is not counted."""
    budget = Budget(warm_up=1, least=1, most=1)
    empty = Profile(device="cpu", dtype="float32", hardware=hardware_name(CPU),
                    versions=versions(CPU), date=today(), num_threads=torch.get_num_threads())
    measurement = Measurement(
        subject=subject, team=Team(1, 0), budget=budget, done=empty,
        save=lambda profile: None, advance=lambda text: None, with_memory=False, modes=("none",),
        timer=timer)
    profile = measurement.run(list(cases_of((micro_batch,), (seq_len,), (1,))))
    update = update_seconds(subject.graph, CPU, "float32", "adamw", available_bytes(CPU, 2),
                            budget, timer=timer)
    return replace(profile, updates=(update,))


def predicted(graph: LayerGraph, profile: Profile, micro_batch: int, seq_len: int) -> float:
    """The planner's own price of one process."""
    run = LayerRun(first_layer=0, num_layers=len(graph.layers))
    layout = Layout(
        model=Reference(name=graph.name), topology=Reference(name="local:1"), mesh=Mesh(),
        request=Request(global_batch=micro_batch, seq_len=seq_len, precision="fp32"),
        micro_batch=micro_batch, num_micro_batches=1, stages=(Stage(runs=(run,)),))
    priced = price(replace(graph, profiles=(profile,)), local_topology(1), layout)
    assert priced.prediction is not None
    assert priced.prediction.measured_share > 0.999
    return priced.prediction.step_s


class Steps:
    """The plain model, trained."""

    def __init__(self, graph: LayerGraph, micro_batch: int, seq_len: int, timer: Timer) -> None:
        self.timer = timer
        self.subject = subject = build_subject(graph, CPU, torch.float32)
        self.model = materialise(subject.model, CPU)
        self.optimizer = make_optimizer("adamw", list(self.model.parameters()), fused=True)
        _, self.inputs = subject.make_inputs(micro_batch, seq_len)
        self.once()

    def once(self) -> float:
        begin = self.timer()
        self.model(**self.inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.timer() - begin


def compare(name: str, micro_batch: int, rounds: int, timer: Timer) -> Result:
    config, seq_len, _ = MODELS[name]
    graph = trace_hugging_face(config, name=name)
    steps = Steps(graph, micro_batch, seq_len, timer)
    before, found, measured = steps.once(), [], []
    for _ in range(rounds):
        profile = profile_once(steps.subject, micro_batch, seq_len, timer)
        after = steps.once()
        found.append(predicted(graph, profile, micro_batch, seq_len))
        measured.append((before + after) / 2)
        before = after
    return Result(model=name, micro_batch=micro_batch, predicted_s=tuple(found),
                  measured_s=tuple(measured))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--cpu-time", action="store_true", help="count this process's own seconds: "
                        "on a machine that is busy with others")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    timer = time.process_time if options.cpu_time else time.perf_counter
    results = []
    print(f"{'model':<10}{'micro-batch':>12}{'predicted (s)':>15}{'measured (s)':>14}{'error':>9}")
    for name in options.models:
        for micro_batch in MODELS[name][2]:
            result = compare(name, micro_batch, options.rounds, timer)
            results.append(result)
            verdict = "" if abs(result.error) <= EACH else f"  above {EACH:.0%}"
            print(f"{name:<10}{micro_batch:>12}{median(result.predicted_s):>15.4f}"
                  f"{median(result.measured_s):>14.4f}{result.error:>9.1%}{verdict}", flush=True)
    middle = median(abs(result.error) for result in results)
    print(f"median error {middle:.1%}{'' if middle <= MEDIAN else f', above {MEDIAN:.0%}'}")
    if options.json:
        write_atomically(options.json, json.dumps(
            {"hardware": hardware_name(CPU), "date": today(), "median_error": middle,
             "rows": [result.data() for result in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
