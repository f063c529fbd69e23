"""`torchrun -m executor train layout.json`: trains, and shows predicted beside measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.checkpoint import latest
from executor.data import Source, make_source
from executor.deferred import Deferred
from executor.legality import check_layout
from executor.metrics import Metrics, Recorder, peak_memory_bytes, reset_peak_memory
from executor.models import build_deferred, graph_of, make_loss
from executor.optimizers import LrSchedule, make_optimizer, make_rate
from executor.parallelize import parallelize
from executor.run import Run
from executor.summary import SETTLING, print_summary, with_prediction
from planner.layout import Layout
from profiler.allocator import keep_freed_memory
from profiler.documents import load
from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph

__all__ = ["Options", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for. timeout_s: how long a rank waits for the others."""

    layout: str
    steps: int
    model: str | None = None
    data: str | None = None
    data_dtype: str | None = None
    loss: str | None = None
    learning_rate: float = 3e-4
    lr_schedule: LrSchedule = "constant"
    lr_floor: float = 0.0
    warmup: int = 0
    weight_decay: float = 0.01
    max_norm: float = 1.0
    seed: int = 0
    metrics: str | None = None
    tensorboard: str | None = None
    save: str | None = None
    save_every: int = 0
    save_async: bool = False
    resume: bool = False
    report: str | None = None
    device: str | None = None
    timeout_s: float = 600.0


def train(options: Options) -> None:
    """Train, on every process that torchrun started.

    Raises:
        InvalidInput: wrong use; nothing has been started then.
    """
    layout = load(Layout, options.layout)
    graph = graph_of(layout, options.model)
    check_layout(layout, graph)
    device_type = _check_processes(layout, options)
    if not options.save and (options.resume or options.save_every or options.save_async):
        raise InvalidInput("--resume, --save-every and --save-async need --save, the folder of "
                           "the checkpoints")
    if device_type == "cpu":
        keep_freed_memory()  # as `profiler model` does
    loss = make_loss(graph, options.loss)
    recorder = _recorder(options)
    model = build_deferred(graph, options.seed)
    plain = model.model if isinstance(model, Deferred) else model
    source = make_source(graph, layout.request.seq_len, options.data, options.data_dtype,
                         getattr(plain, "config", None))
    if "RANK" in os.environ:
        _start_group(device_type, options.timeout_s)
    rate = make_rate(options.lr_schedule, options.warmup, options.steps, options.lr_floor)
    run = parallelize(
        model, with_prediction(layout, graph), loss=loss, graph=graph,
        device_type=device_type, max_norm=options.max_norm, seed=options.seed,
        optimizer=make_optimizer(layout.request, options.learning_rate, options.weight_decay),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate))
    del model, plain
    num_samples = _resume(run, options) if options.resume else 0
    history = _loop(run, graph, source, options, recorder, num_samples)
    print_summary(run, history, options.report)
    dist.barrier()
    if recorder is not None:
        recorder.close()


def _check_processes(layout: Layout, options: Options) -> str:
    """Refuse a wrong number of processes or a missing device before any group starts."""
    world, needed = int(os.environ.get("WORLD_SIZE", 1)), layout.mesh.num_devices
    if world != needed:
        raise InvalidInput(f"{options.layout} needs {needed} processes, {world} are running: start "
                           f"it with torchrun --nproc-per-node {needed} -m executor train ... (on "
                           f"one host; over several, --nnodes x --nproc-per-node = {needed}, see "
                           f"`plan launch`)")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    local = int(os.environ.get("LOCAL_RANK", 0))
    if device == "cuda" and local >= torch.cuda.device_count():
        raise InvalidInput(f"local rank {local} needs CUDA device {local}, and torch sees "
                           f"{torch.cuda.device_count()} here: use --device cpu, or fewer "
                           f"processes a host")
    return device


def _recorder(options: Options) -> Recorder | None:
    """Rank 0 opens what it writes to before anything starts, and refuses what it cannot."""
    if int(os.environ.get("RANK", 0)) != 0:
        return None
    if options.save is not None:
        folder = Path(options.save)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"--save {folder}: cannot be written: "
                               f"{error.strerror or error}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InvalidInput(f"--save {folder}: cannot be written: permission denied")
    return Recorder(options.metrics, options.tensorboard)


def _start_group(device_type: str, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def _resume(run: Run, options: Options) -> int:
    """Load the last whole checkpoint, if there is one; the number of samples it has seen."""
    assert options.save is not None
    found = latest(options.save)
    if found is None:
        if run.mesh.rank == 0:
            print(f"no checkpoint in {options.save} yet: starting at step 0", flush=True)
        return 0
    position = run.load(found)
    if run.mesh.rank == 0:
        print(f"resumed from {found}: step {run.num_steps}", flush=True)
        if run.num_steps >= options.steps:
            print(f"nothing left to do: --steps is {options.steps}", flush=True)
    return int(position.get("num_samples", run.num_steps * run.layout.request.global_batch))


def _loop(run: Run, graph: LayerGraph, source: Source, options: Options,
          recorder: Recorder | None, num_samples: int) -> list[Metrics]:
    request = run.layout.request
    history: list[Metrics] = []
    batch = request.global_batch
    flops = 3 * graph.forward_flops(1, request.seq_len) * batch
    reset_peak_memory(run.mesh.device)
    while run.num_steps < options.steps:
        mine = batch // run.layout.mesh.dp
        inputs, targets = source.batch(num_samples + run.mesh.dp_rank * mine, mine)
        assert run.optimizer is not None
        rate = float(run.optimizer.param_groups[0]["lr"])
        begin = time.perf_counter()
        loss = run.step(inputs, targets)
        if run.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        num_samples += batch
        run.clock.settle()
        if len(history) + 1 == SETTLING and run.num_steps < options.steps:
            run.clock.forget()
        history.append(_metrics(run, loss, rate, seconds, flops))
        if recorder is not None:
            recorder.write(history[-1])
        due = options.save_every and run.num_steps % options.save_every == 0
        if options.save and (due or run.num_steps == options.steps):
            run.save(options.save, asynchronous=options.save_async, num_samples=num_samples)
    run.wait_for_save()
    return history


def _metrics(run: Run, loss: float, rate: float, seconds: float, flops: int) -> Metrics:
    layout = run.layout
    return Metrics(
        step=run.num_steps, loss=loss, grad_norm=run.grad_norm, learning_rate=rate,
        step_s=seconds, tokens_per_s=layout.request.global_batch * layout.request.seq_len / seconds,
        tflops_per_s_per_device=flops / seconds / layout.mesh.num_devices / 1e12,
        mfu=_mfu(run, seconds), peak_memory_bytes=peak_memory_bytes(run.mesh.device))


def _mfu(run: Run, seconds: float) -> float | None:
    """The same FLOPs over the same peak as predicted, in another time: on that kind of device."""
    predicted: Any = run.layout.prediction
    if predicted is None:
        return None
    planned_for_cpu = all(stage.device.startswith("cpu") for stage in predicted.stages)
    if planned_for_cpu != (run.mesh.device.type == "cpu"):
        return None
    return float(predicted.mfu * predicted.step_s / seconds)
