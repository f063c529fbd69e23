"""Run by torchrun on eight processes: what the planner answers to random requests, against one.

The processes plan first, each its share of the requests. Then, for every number of devices that an
answer uses, as many groups of so many processes as there are take the answers in turn: each runs
two steps in float64 beside the model alone. The parity cases of eight processes follow.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from executor.compare import FLOOR, _call
from executor.float64 import float64
from executor.parallelize import parallelize
from planner.layout import Layout
from profiler.documents import dump, load
from profiler.layer_graph import LayerGraph
from tests.executor import requests
from tests.executor.parity_cases import EIGHT
from tests.executor.parity_worker import run_cases

STEPS = 2
LEARNING_RATE = 1e-2


@dataclass(slots=True)
class Answer:
    question: requests.Question
    graph: LayerGraph
    layout: Layout


def plan_all(numbers: list[int], rank: int, world: int, folder: Path) -> None:
    """Plan this process's share of the requests, into files."""
    families = sorted({number % len(requests.MODELS) for number in numbers})[rank::world]
    graphs: dict[int, LayerGraph] = {}
    for number in numbers:
        family = number % len(requests.MODELS)
        if family not in families:
            continue
        question = requests.make_question(number)
        graph = graphs.get(family) or graphs.setdefault(family, requests.make_model(question))
        layout = requests.plan(question, graph)
        (folder / f"{number}.graph").write_text(dump(graph), encoding="utf-8")
        (folder / f"{number}.layout").write_text(dump(layout), encoding="utf-8")


def load_all(numbers: list[int], folder: Path) -> list[Answer]:
    return [Answer(requests.make_question(n), load(LayerGraph, folder / f"{n}.graph"),
                   load(Layout, folder / f"{n}.layout")) for n in numbers]


def alone(answer: Answer, model: nn.Module, max_norm: float
          ) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps of one process, and the gradients of the first."""
    inputs, targets, loss = requests.batch_of(answer.graph, answer.layout, torch.float64)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    losses, first = [], {}
    for step in range(STEPS):
        with float64():
            value = loss.total(_call(model, inputs), targets) / loss.count(targets)
            value.backward()
        losses.append(value.item())
        if step == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def difference(answer: Answer, max_norm: float = 0.1) -> float:
    """The largest relative difference of a gradient of the first step, or of a loss."""
    model = requests.module_of(answer.graph, torch.float64)
    wanted, truth = alone(answer, copy.deepcopy(model), max_norm)
    inputs, targets, loss = requests.batch_of(answer.graph, answer.layout, torch.float64)
    run = parallelize(
        model, answer.layout, graph=answer.graph, loss=loss, device_type="cpu", max_norm=max_norm,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE))
    with float64():
        losses = [run.forward_backward(inputs, targets)]
        gradients = {name: g.clone() for name, g in run.gradients().items()}  # clipped in place
        run.update()
        losses.append(run.step(inputs, targets))
    scale = max(float(g.abs().max()) for g in truth.values())
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
    for name in truth.keys() & gradients.keys():
        floor = max(float(truth[name].abs().max()), FLOOR * scale)
        error = float((gradients[name] - truth[name]).abs().max()) / floor
        worst = error if not error <= worst else worst
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (worst, set(gradients)))
    if truth.keys() - set().union(*(names for _, names in every)):
        return float("inf")  # a gradient that no rank has
    return max(error for error, _ in every)


def run_group(answers: list[Answer], rank: int, size: int, store: Path) -> dict[int, Any]:
    """Run answers on a process group of `size`."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank,
                            world_size=size, timeout=timedelta(seconds=60))
    found = {}
    for answer in answers:
        faulthandler.dump_traceback_later(90)
        begin = time.monotonic()
        try:
            error = difference(answer)
        except Exception:
            print(f"{answer.question} failed:\n{dump(answer.layout)}\n{traceback.format_exc()}",
                  flush=True)
            os._exit(1)  # at once: an orderly end would wait for the other ranks
        faulthandler.cancel_dump_traceback_later()
        found[answer.question.number] = error
        if rank == 0:
            print(f"{answer.question.number} {answer.question.model} {describe(answer)}: "
                  f"{error:.1e} {time.monotonic() - begin:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return found


def describe(answer: Answer) -> str:
    layout = answer.layout
    choices = Counter(f"{c.recompute}{'' if c.reshard else ' kept'}"
                      f"{'' if c.tensor_parallel or layout.mesh.tp == 1 else ' whole'}"
                      for s in layout.stages for _, c in s.iter_layers())
    mesh = " ".join(f"{axis} {layout.mesh.degree(axis)}" for axis in layout.mesh.order)
    return (f"{mesh}, {layout.micro_batch} x {layout.num_micro_batches}, {layout.schedule.name}, "
            f"{dict(choices)}")


def run_parity(graphs: Path, rank: int, world: int, store: Path) -> dict[str, Any]:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank,
                            world_size=world, timeout=timedelta(seconds=60))
    return run_cases(EIGHT, graphs)


def main() -> None:
    """Arguments: a folder for results, the folder of graphs, the numbers of the requests."""
    folder, graphs = Path(sys.argv[1]), Path(sys.argv[2])
    numbers = [int(number) for number in sys.argv[3].split(",")]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    plan_all(numbers, rank, world, folder)
    (folder / f"planned-{rank}").touch()
    while len(list(folder.glob("planned-*"))) < world:
        time.sleep(0.05)
    answers = load_all(numbers, folder)
    found: dict[int, Any] = {}
    for size in sorted({a.layout.mesh.num_devices for a in answers}):
        group, place = divmod(rank, size)
        if group < world // size:
            mine = [a for a in answers if a.layout.mesh.num_devices == size][group::world // size]
            found |= run_group(mine, place, size, folder / f"store-{size}-{group}")
    if "parity" in sys.argv:
        found |= run_parity(graphs, rank, world, folder / "store-parity")
    if found:
        (folder / f"found-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    main()
