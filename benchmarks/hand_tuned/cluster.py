"""The contest on the processes that torchrun started: a user's own cluster.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m benchmarks.hand_tuned \\
        --topology my-cluster.yaml --model llama3-8b --global-batch 64 --seq-len 4096

Rank 0 plans and everybody runs; on accelerators each layout is built anew for every turn, since one
fills the memory. The model may be anything that `plan` takes and the executor can build; a profile
of it (`python -m profiler model`) and measured links make the predictions those of this cluster.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.hand_tuned.contest import rows_of
from benchmarks.hand_tuned.entrants import Field, make_field
from benchmarks.hand_tuned.score import score
from benchmarks.hand_tuned.table import print_scenario
from benchmarks.hand_tuned.worker import Job, measure
from executor.data import make_source
from executor.deferred import Deferred
from executor.losses import cross_entropy
from executor.models import build_deferred
from planner.layout import Layout
from planner.models import resolve
from profiler.allocator import keep_freed_memory
from profiler.documents import dump, parse, write_atomically
from profiler.errors import InvalidInput
from profiler.hardware import pick_device

__all__ = ["compete_here"]

STEPS = 3
"""Timed in each turn where a layout is built anew."""


def compete_here(model: str, topology: str, links: str | None, folder: Path,
                 request: Mapping[str, Any], *, seed: int = 0, num_random: int = 2) -> int:
    """Run the contest on every process of the job; rank 0 prints and writes the result.

    Raises:
        InvalidInput: not under torchrun, or another number of processes than the topology has.
    """
    if "RANK" not in os.environ:
        raise InvalidInput("--model runs on processes: start it with torchrun --nproc-per-node N "
                           "-m benchmarks.hand_tuned ... (or price it with --predict)")
    device = pick_device(None)
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
    field = make_field(model, topology, links, request, num_random=num_random, seed=seed)
    plan = field.entrants[0].layout
    world = int(os.environ["WORLD_SIZE"])
    if plan.mesh.num_devices != world:
        raise InvalidInput(f"{topology} has {plan.mesh.num_devices} devices, torchrun started "
                           f"{world} processes")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                            device_id=device if device.type == "cuda" else None)
    rank = dist.get_rank()
    layouts = _of_first_rank(field)
    graph = resolve(model)
    built = build_deferred(graph, 0)
    plain = built.model if isinstance(built, Deferred) else built
    source = make_source(graph, plan.request.seq_len, None, None, getattr(plain, "config", None))
    batch = source.batch(0, plan.request.global_batch)
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "measured.json"
        on_gpu = device.type == "cuda"
        job = Job(layouts=(), output=str(output), keep=not on_gpu, steps=STEPS if on_gpu else 1)
        measure(job, layouts, graph, batch, cross_entropy, device.type, {}, {})
        if rank == 0:
            _report(field, json.loads(output.read_text()), model, topology, folder)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _of_first_rank(field: Field) -> list[Layout]:
    """The layouts that rank 0 found, on every rank: all must run the same."""
    texts: list[Any] = [[dump(replace(entrant.layout, prediction=None, proof=None,
                                      alternatives=(), links=None))
                         for entrant in field.entrants]]
    dist.broadcast_object_list(texts)
    return [parse(Layout, json.loads(text), "layout") for text in texts[0]]


def _report(field: Field, measured: dict[str, Any], model: str, topology: str, folder: Path
            ) -> None:
    rows = rows_of(field, measured)
    request = field.entrants[0].layout.request
    result = {"name": model, "why": f"on {topology}", "rows": rows,
              "scenario": {"global_batch": request.global_batch, "seq_len": request.seq_len},
              "refused": [list(pair) for pair in field.refused], "score": asdict(score(rows))}
    print_scenario(result, Console(width=150))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "cluster.json", json.dumps(result, indent=1) + "\n")
