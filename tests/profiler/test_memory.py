"""What tracing says is kept for backward, against what the allocator counts on this CPU.

Every family, in bfloat16 and float32, with each recompute. Attention keeps what an accelerator's
fused kernel does: where a bias is learned (T5), torch has no such kernel for CPUs, and keeps
the scores.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from planner.capabilities import RecomputeMode
from planner.chain import make_chain
from planner.cost.compute import Shard
from planner.cost.memory import activation_memory
from profiler.building import random_arguments
from profiler.hugging_face import build_model, input_maker, quiet
from profiler.layer_calls import LayerCalls
from profiler.layer_graph import LayerGraph
from profiler.losses import attach, taken_apart
from profiler.memory_meter import MemoryMeter
from profiler.recompute import recomputed
from profiler.trace import input_maker as input_maker_of
from profiler.trace_run import seeds_of
from tests.profiler.trace_models import FAMILIES, PLAIN, WITH_LOSS, traced

MICRO_BATCH, LENGTH = 2, 128
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")

aten = torch.ops.aten


class FusedAttention(torch.autograd.Function):  # type: ignore[misc]
    """The fused kernel of CPUs, with a gradient of the bias."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: Any) -> Any:
        out, statistics = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, mask, out, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise NotImplementedError  # what it keeps is looked at, not what it does with that


def fused(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
          is_causal: bool = False, scale: float | None = None, **more: Any) -> Any:
    if attn_mask is not None and attn_mask.requires_grad:
        return FusedAttention.apply(q, k, v, attn_mask, is_causal, scale)
    return ORIGINAL(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, **more)


ORIGINAL = F.scaled_dot_product_attention


def family(name: str) -> tuple[LayerGraph, Any, Callable[[torch.dtype], Any], int]:
    """(graph, model, what makes arguments of a dtype, length)."""
    if name in PLAIN:
        model, example = PLAIN[name]()
        shape = (MICRO_BATCH, *example.shape[1:])
        return traced(name), model, lambda dtype: ((torch.ones(shape, dtype=dtype),), {}), 1
    graph = traced(name)
    if name in WITH_LOSS:
        built = taken_apart(WITH_LOSS[name](), name)
        attach(built)
        length = LENGTH if graph.sample == "tokens" else 1
        make = input_maker_of((built.inputs,), {}, built.inputs, graph.sample)
        return graph, built.module, lambda dtype: random_arguments(
            make(MICRO_BATCH, length), ((built.inputs,), {}), CPU, dtype), length
    with quiet():
        model, task, config = build_model(FAMILIES[name], contextlib.nullcontext)
    length = LENGTH if graph.sample == "tokens" else 1
    bounds = {"labels": config.num_labels if task == "images" else config.vocab_size,
              "input_ids": getattr(config, "vocab_size", 2)}
    make = input_maker(task, config)
    return graph, model, lambda dtype: random_arguments(
        make(MICRO_BATCH, length), bounds, CPU, dtype), length


def kept_bytes(model: Any, graph: LayerGraph, make: Callable[[], Any], mode: Any) -> int:
    """What is allocated between forward and backward, the sample included."""
    def handle(index: int, module: Any, forward: Any, args: Any, more: Any) -> Any:
        return recomputed(mode, forward)(*args, **more)

    names = [layer.name for layer in graph.layers]
    with LayerCalls.intercept(model, names, handle), MemoryMeter(CPU) as meter:
        args, kwargs = make()
        nodes = [result.grad_fn for result in seeds_of(model(*args, **kwargs))]
        del args, kwargs
    del nodes
    return meter.left_bytes


@pytest.mark.parametrize("name", [*FAMILIES, *PLAIN, *WITH_LOSS])
def test_kept_bytes_are_as_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()  # a checkpoint's copy of it is no activation
    monkeypatch.setattr(torch, "get_rng_state", lambda: state)
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)
    graph, model, make, length = family(name)
    for dtype in DTYPES:
        model.to(dtype).train()
        args, kwargs = make(dtype)
        model(*args, **kwargs)  # makes what stays for good
        shard = Shard(micro_batch=MICRO_BATCH, seq_len=length, compute_bytes=dtype.itemsize)
        for mode in MODES:
            traced = sum(
                run.count * activation_memory(graph.kinds[run.kind], mode, shard).saved_bytes
                for run in make_chain(graph).runs)
            measured = kept_bytes(model, graph, functools.partial(make, dtype), mode)
            assert traced == pytest.approx(measured, rel=0.02), (dtype, mode)
