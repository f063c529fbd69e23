"""`torchrun -m executor train layout.json`: trains, and shows predicted beside measured."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from executor.checkpoint import latest
from executor.data import Source, make_source
from executor.legality import check_layout
from executor.losses import cross_entropy
from executor.models import build_module, graph_of
from executor.parallelize import parallelize
from executor.run import Run
from planner.layout import Layout
from profiler.documents import load
from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph

__all__ = ["Options", "train"]

SETTLING = 2
"""First steps left out of the measured step time: they allocate and connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for. timeout_s: how long a rank waits for the others."""

    layout: str
    steps: int
    model: str | None = None
    data: str | None = None
    data_dtype: str | None = None
    learning_rate: float = 3e-4
    warmup: int = 0
    max_norm: float = 1.0
    seed: int = 0
    metrics: str | None = None
    tensorboard: str | None = None
    save: str | None = None
    save_every: int = 0
    resume: bool = False
    device: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One step. step_s and tokens_per_s are of the whole job; memory is this rank's peak."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    tokens_per_s: float
    tflops_per_s_per_device: float
    mfu: float | None
    peak_memory_bytes: int | None

    def line(self) -> str:
        parts = [f"step {self.step:>6}", f"loss {self.loss:.4f}", f"norm {self.grad_norm:.3f}",
                 f"{self.step_s * 1e3:.1f} ms", f"{self.tokens_per_s:,.0f} tokens/s",
                 f"{self.tflops_per_s_per_device:.3g} TFLOP/s a device"]
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.peak_memory_bytes is not None:
            parts.append(f"{self.peak_memory_bytes / 1e9:.2f} GB")
        return "  ".join(parts)


def train(options: Options) -> None:
    """Train, on every process that torchrun started.

    Raises:
        InvalidInput: wrong use; nothing has been started then.
    """
    layout = load(Layout, options.layout)
    graph = graph_of(layout, options.model)
    check_layout(layout, graph)
    device_type = _check_processes(layout, options)
    if options.resume and not options.save:
        raise InvalidInput("--resume needs --save, the folder of the checkpoints")
    model = build_module(graph, options.seed)
    source = make_source(graph, layout.request.seq_len, options.data, options.data_dtype,
                         getattr(model, "config", None))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo",
                                timeout=timedelta(seconds=options.timeout_s))
    run = parallelize(
        model, layout, loss=cross_entropy(), graph=graph, device_type=device_type,
        optimizer=_optimizer(layout, options), max_norm=options.max_norm, seed=options.seed,
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda step: min(1.0, (step + 1) / max(1, options.warmup))))
    del model
    if options.resume and (options.save and latest(options.save)):
        run.load(options.save)
    elif options.resume and run.mesh.rank == 0:
        print(f"no checkpoint in {options.save} yet: starting at step 0", flush=True)
    history = _loop(run, graph, source, options)
    _report(run, history)
    dist.barrier()


def _check_processes(layout: Layout, options: Options) -> str:
    """Refuse a wrong number of processes or a missing device before any group starts."""
    world, needed = int(os.environ.get("WORLD_SIZE", 1)), layout.mesh.num_devices
    if world != needed:
        raise InvalidInput(f"{options.layout} needs {needed} processes, {world} are running: start "
                           f"it "
                           f"with torchrun --nproc-per-node {needed} -m executor train ... (on one "
                           f"host; over several, --nnodes x --nproc-per-node = {needed})")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    local = int(os.environ.get("LOCAL_RANK", 0))
    if device == "cuda" and local >= torch.cuda.device_count():
        raise InvalidInput(f"local rank {local} needs CUDA device {local}, and torch sees "
                           f"{torch.cuda.device_count()} here: use --device cpu, or fewer "
                           f"processes a "
                           f"host")
    return device


def _optimizer(layout: Layout, options: Options) -> Callable[[Any], torch.optim.Optimizer]:
    name, rate = layout.request.optimizer, options.learning_rate
    if name == "adamw":
        fused = layout.request.fused_optimizer and torch.cuda.is_available()
        return lambda ps: torch.optim.AdamW(ps, lr=rate, fused=fused or None)
    if name in {"sgd", "sgd-momentum"}:
        momentum = 0.9 if name == "sgd-momentum" else 0.0
        return lambda ps: torch.optim.SGD(ps, lr=rate, momentum=momentum)
    raise InvalidInput(f"optimizer {name!r}: the command line has adamw, sgd and sgd-momentum; "
                       f"pass any other "
                       f"to executor.parallelize from Python")


def _loop(run: Run, graph: LayerGraph, source: Source, options: Options) -> list[Metrics]:
    request, history = run.layout.request, []
    batch, is_first = request.global_batch, run.mesh.rank == 0
    flops = 3 * graph.forward_flops(1, request.seq_len) * batch
    with contextlib.ExitStack() as stack:
        log = (stack.enter_context(Path(options.metrics).open("a", encoding="utf-8"))
               if options.metrics and is_first else None)
        board = _board(options.tensorboard) if is_first else None
        while run.num_steps < options.steps:
            mine = batch // run.layout.mesh.dp
            inputs, targets = source.batch(run.num_steps * batch + run.mesh.dp_rank * mine, mine)
            assert run.optimizer is not None
            rate = float(run.optimizer.param_groups[0]["lr"])
            begin = time.perf_counter()
            loss = run.step(inputs, targets)
            if run.mesh.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            history.append(_metrics(run, loss, rate, seconds, flops))
            if is_first:
                print(history[-1].line(), flush=True)
            if log is not None:
                log.write(json.dumps(asdict(history[-1])) + "\n")
                log.flush()
            if board is not None:
                for key, value in asdict(history[-1]).items():
                    if value is not None:
                        board.add_scalar(key, value, run.num_steps)
            due = options.save_every and run.num_steps % options.save_every == 0
            if options.save and (due or run.num_steps == options.steps):
                run.save(options.save, num_samples=run.num_steps * batch)
    return history


def _board(folder: str | None) -> Any:
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InvalidInput("--tensorboard needs the package tensorboard, which is not installed") \
            from None
    return SummaryWriter(folder)


def _metrics(run: Run, loss: float, rate: float, seconds: float, flops: int) -> Metrics:
    layout = run.layout
    predicted = layout.prediction
    is_cuda = run.mesh.device.type == "cuda"
    return Metrics(
        step=run.num_steps, loss=loss, grad_norm=run.grad_norm, learning_rate=rate,
        step_s=seconds, tokens_per_s=layout.request.global_batch * layout.request.seq_len / seconds,
        tflops_per_s_per_device=flops / seconds / layout.mesh.num_devices / 1e12,
        # the same FLOPs over the same peak as predicted, in another time
        mfu=predicted.mfu * predicted.step_s / seconds if predicted and is_cuda else None,
        peak_memory_bytes=torch.cuda.max_memory_allocated() if is_cuda else None)


def _report(run: Run, history: list[Metrics]) -> None:
    """Predicted against measured: step time, and peak memory of each stage. Collective."""
    peak = history[-1].peak_memory_bytes if history else None
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (run.mesh.coordinate("pp"), peak))
    if run.mesh.rank != 0 or not history:
        return
    settled = history[SETTLING:] or history
    rows: list[tuple[str, str, float | None, float | None]] = [
        ("step time", "s", median(m.step_s for m in settled),
         run.layout.prediction.step_s if run.layout.prediction else None)]
    for stage in range(run.layout.mesh.pp):
        peaks = [p for place, p in every if place == stage and p is not None]
        predicted = next((s.total_memory_bytes for s in run.layout.prediction.stages
                          if s.pipeline_rank == stage), None) if run.layout.prediction else None
        rows.append((f"peak memory, pipeline rank {stage}", "GB",
                     max(peaks) / 1e9 if peaks else None,
                     predicted / 1e9 if predicted is not None else None))
    print(f"\n{'':<32}{'predicted':>12}{'measured':>12}{'ratio':>9}")
    for name, unit, measured, forecast in rows:
        ratio = f"{measured / forecast:.2f}" if measured and forecast else "-"
        figures = f"{_number(forecast):>12}{_number(measured):>12}{ratio:>9}"
        print(f"{name + ' (' + unit + ')':<32}{figures}")
    print(f"measured: median of {len(settled)} steps", flush=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
