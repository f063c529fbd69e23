"""`python -m executor verify layout.json`: a layout's own kind of run against one process, on CPUs.

A Hugging Face model is shrunk (see `shrink`), the layout with it; any other runs as it is, under
fewer processes. The gradients of a step in float64 and the losses of five steps are compared with
those of the model alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from math import prod
from pathlib import Path

import torch

from executor.compare import GRADIENT_LIMIT, STEPS, STEPS_LIMIT, Comparison, compare
from executor.legality import check_layout
from executor.models import graph_of
from executor.problems import problem_of
from executor.run import Run
from executor.shrink import Small, shrink_config, shrink_layout
from planner.layout import Layout
from profiler.documents import dump, load, write_atomically
from profiler.errors import InvalidInput, MeshwrightError
from profiler.layer_graph import LayerGraph

__all__ = ["print_table", "run_worker", "verify"]

MAX_BYTES = 2**30
"""Largest model, in float64, that is verified as it is: each process builds all of it."""

GRAPH, LAYOUT, RESULT, PROBLEM = "graph.json", "layout.json", "result.json", "problem.txt"


def verify(path: str, model: str | None, max_processes: int, timeout_s: float,
           worker: str = "executor.verify") -> bool:
    """Print a table of differences; whether all are within their limits.

    worker: the module that each process runs, on the folder of the documents.

    Raises:
        InvalidInput: the layout is illegal, its model can neither be shrunk nor run as it is, or
            the processes fail.
    """
    layout = load(Layout, path)
    graph = graph_of(layout, model)
    check_layout(layout, graph)
    small_graph, small = _shrunk(layout, graph, max_processes)
    check_layout(small, small_graph)
    print(f"{graph.name}: {len(graph.layers)} layers, {_mesh(layout)}")
    print(f"verified on: {len(small_graph.layers)} layers {_size(small_graph, graph)}, "
          f"{_mesh(small)}, {small.num_micro_batches} micro-batches, {small.schedule.name}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / GRAPH).write_text(dump(small_graph), encoding="utf-8")
        (Path(folder) / LAYOUT).write_text(dump(small), encoding="utf-8")
        output = _start(small.mesh.num_devices, worker, folder, timeout_s)
        result, problem = Path(folder) / RESULT, Path(folder) / PROBLEM
        if problem.is_file():
            raise InvalidInput(problem.read_text(encoding="utf-8"))
        if not result.is_file():
            raise InvalidInput(f"verify: the processes ended without a result:\n{output[-3000:]}")
        found = Comparison(**json.loads(result.read_text(encoding="utf-8")))
    print_table(found)
    return found.passed


def _shrunk(layout: Layout, graph: LayerGraph, max_processes: int) -> tuple[LayerGraph, Layout]:
    shape = Small.of(layout, max_processes)
    config = graph.source.hugging_face_config
    if config is not None:
        from profiler.hugging_face import trace_hugging_face

        small_graph = trace_hugging_face(shrink_config(config, shape.num_blocks), name=graph.name)
        return small_graph, shrink_layout(shape.layout, layout, small_graph, graph)
    if graph.source.python_function is None:
        raise InvalidInput(f"the LayerGraph of {graph.name!r} does not say what it was traced "
                           f"from, so there is no model to run: name its config or function with "
                           f"--model, or compare from Python with executor.compare.compare")
    size = sum(prod(p.shape) * 8 for _, p in graph.iter_parameters())
    if size > MAX_BYTES:
        raise InvalidInput(f"{graph.name!r} comes from a function, so verify runs it as it is, in "
                           f"float64: its parameters are {size / 2**30:.1f} GiB then, at most "
                           f"{MAX_BYTES / 2**30:.0f} GiB are. Let --model name a function that "
                           f"builds a narrower one, with a layout for it")
    num_stages = shape.layout.mesh.pp * shape.layout.schedule.chunks
    if num_stages > len(graph.layers):
        raise InvalidInput(f"{graph.name!r} has {len(graph.layers)} layers, {num_stages} stages "
                           f"are to be verified")
    small = replace(shape.layout, request=replace(shape.layout.request,
                                                  seq_len=layout.request.seq_len))
    return graph, shrink_layout(small, layout, graph, graph)


def _size(small: LayerGraph, graph: LayerGraph) -> str:
    return "as they are" if small is graph else f"of width {_width(small)}"


def _mesh(layout: Layout) -> str:
    mesh = layout.mesh
    parts = [f"{axis} {mesh.degree(axis)}" for axis in mesh.order if mesh.degree(axis) > 1]
    return f"{mesh.num_devices} processes ({', '.join(parts) or 'one device'})"


def _width(graph: LayerGraph) -> int:
    return min(p.shape[-1] for _, p in graph.iter_parameters() if len(p.shape) == 2)


def _start(processes: int, worker: str, folder: str, timeout_s: float) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={processes}", "-m", worker, folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.communicate(timeout=timeout_s)[0] or ""
    except subprocess.TimeoutExpired:
        raise InvalidInput(f"verify: not done after {timeout_s:.0f} s; allow more with --timeout") \
            from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def print_table(found: Comparison) -> None:
    rows = [
        ("loss of the first step (float64)", found.loss, GRADIENT_LIMIT),
        (f"gradients ({found.num_compared} parameters, float64)", found.gradient, GRADIENT_LIMIT),
        (f"losses of {STEPS} AdamW steps (float32)", found.steps, STEPS_LIMIT),
        ("parameters without their gradient", float(found.num_missing), 0.0)]
    print(f"\n{'difference from one process':<48}{'found':>10}{'allowed':>10}")
    for name, value, limit in rows:
        verdict = "ok" if value <= limit else "WRONG"
        print(f"{name:<48}{value:>10.1e}{limit:>10.0e}  {verdict}")
    if found.passed:
        print("\nThe layout computes what the model alone computes.")
    else:
        where = f" (worst: {found.where})" if found.where else ""
        print(f"\nThe layout does NOT compute what the model alone computes{where}.")


def run_worker(folder: Path, change: Callable[[Run], None] = lambda run: None) -> None:
    """What each process does; `change` breaks the run where a test wants to see that found."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    graph, layout = load(LayerGraph, folder / GRAPH), load(Layout, folder / LAYOUT)
    try:
        found = compare(problem_of(graph, layout), layout, graph, change=change)
    except MeshwrightError as error:
        write_atomically(folder / PROBLEM, str(error))
        os._exit(error.exit_status)  # an orderly end would wait for the other ranks
    if dist.get_rank() == 0:
        write_atomically(folder / RESULT, json.dumps(asdict(found)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_worker(Path(sys.argv[1]))
