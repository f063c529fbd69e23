"""`python -m executor verify layout.json`: a layout's own kind of run against one process, on CPUs.

The model is shrunk (see `shrink`), the layout with it, and the gradients of a step in float64 and
the losses of five steps are compared with those of the model alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from executor.compare import (
    GRADIENT_LIMIT,
    STEPS,
    STEPS_LIMIT,
    Comparison,
    Problem,
    compare,
)
from executor.data import make_source
from executor.legality import check_layout
from executor.losses import cross_entropy
from executor.models import build_module, graph_of
from executor.shrink import Small, shrink_config, shrink_layout
from planner.layout import Layout
from profiler.documents import dump, load
from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph

__all__ = ["verify"]

GRAPH, LAYOUT, RESULT = "graph.json", "layout.json", "result.json"


def verify(path: str, model: str | None, max_processes: int, timeout_s: float) -> bool:
    """Print a table of differences; whether all are within their limits.

    Raises:
        InvalidInput: the layout is illegal, its model cannot be shrunk, or the processes fail.
    """
    layout = load(Layout, path)
    graph = graph_of(layout, model)
    check_layout(layout, graph)
    small_graph, small = _shrunk(layout, graph, max_processes)
    check_layout(small, small_graph)
    print(f"{graph.name}: {len(graph.layers)} layers, {_mesh(layout)}")
    print(f"verified on: {len(small_graph.layers)} layers of width {_width(small_graph)}, "
          f"{_mesh(small)}, {small.num_micro_batches} micro-batches, {small.schedule.name}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / GRAPH).write_text(dump(small_graph), encoding="utf-8")
        (Path(folder) / LAYOUT).write_text(dump(small), encoding="utf-8")
        output = _start(small.mesh.num_devices, folder, timeout_s)
        result = Path(folder) / RESULT
        if not result.is_file():
            raise InvalidInput(f"verify: the processes ended without a result:\n{output[-3000:]}")
        found = Comparison(**json.loads(result.read_text(encoding="utf-8")))
    _table(found)
    return found.passed


def _shrunk(layout: Layout, graph: LayerGraph, max_processes: int) -> tuple[LayerGraph, Layout]:
    from profiler.hugging_face import trace_hugging_face

    config = graph.source.hugging_face_config
    if config is None:
        raise InvalidInput(f"{graph.name!r} is no Hugging Face model, so verify cannot shrink it: "
                           f"compare it from Python with executor.compare.compare")
    shape = Small.of(layout, max_processes)
    small_graph = trace_hugging_face(shrink_config(config, shape.num_blocks), name=graph.name)
    return small_graph, shrink_layout(shape.layout, layout, small_graph, graph)


def _mesh(layout: Layout) -> str:
    mesh = layout.mesh
    parts = [f"{axis} {mesh.degree(axis)}" for axis in mesh.order if mesh.degree(axis) > 1]
    return f"{mesh.num_devices} processes ({', '.join(parts) or 'one device'})"


def _width(graph: LayerGraph) -> int:
    return min(p.shape[-1] for _, p in graph.iter_parameters() if len(p.shape) == 2)


def _start(processes: int, folder: str, timeout_s: float) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={processes}", "-m", "executor.verify", folder]
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


def _table(found: Comparison) -> None:
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


def _problem(graph: LayerGraph, layout: Layout) -> Problem:
    """The small model with one batch whose micro-batches hold unequal numbers of targets."""
    batch = layout.request.global_batch

    def model(dtype: torch.dtype) -> Any:
        made = build_module(graph, seed=0).to(dtype)
        if hasattr(made.config, "_experts_implementation"):
            made.config._experts_implementation = "eager"  # the fused one knows no float64
        return made

    source = make_source(graph, layout.request.seq_len, None, None, model(torch.float32).config)
    inputs, targets = source.batch(0, batch)
    if targets.dim() > 1:
        hidden = torch.arange(targets.shape[1])[None] < torch.arange(batch)[:, None]
        targets = targets.masked_fill(hidden, -100)

    def cast(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return Problem(model=model, inputs=cast, targets=lambda dtype: targets, loss=cross_entropy(),
                   max_norm=1.0)


def _worker(folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    graph, layout = load(LayerGraph, folder / GRAPH), load(Layout, folder / LAYOUT)
    found = compare(_problem(graph, layout), layout, graph)
    if dist.get_rank() == 0:
        (folder / RESULT).write_text(json.dumps(asdict(found)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
