"""The tracer against torch itself: parameters, FLOPs and saved tensors of real small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

from profiler.hugging_face import build_model
from profiler.layer_graph import LayerGraph
from tests.profiler.trace_models import FAMILIES, PLAIN, traced

BATCH, SEQ_LEN = 3, 48

COUNTABLE = [name for name in FAMILIES if name != "mixtral"]
"""Families whose real run does the work that is counted (routing makes it random in a mixture)."""


@pytest.fixture(scope="module")
def graphs() -> Callable[[str], LayerGraph]:
    return traced


def real(name: str, dtype: torch.dtype) -> tuple[nn.Module, Callable[[], list[torch.Tensor]], int]:
    """A real model, a function that runs it and returns what backward starts from, and s."""
    if name in PLAIN:
        model, example = PLAIN[name]()
        args, kwargs, seq_len = (example[:1].expand(BATCH, *example.shape[1:]).to(dtype),), {}, 1
    else:
        meta, task, config = build_model(FAMILIES[name])
        model = type(meta)(config)
        tokens = torch.randint(2, 300, (BATCH, SEQ_LEN))
        args, seq_len = (), SEQ_LEN
        kwargs = {"input_ids": tokens, "labels": tokens.clone()}
        if task == "images":
            seq_len = 1
            kwargs = {"pixel_values": torch.zeros(BATCH, 3, 32, 32, dtype=dtype),
                      "labels": torch.zeros(BATCH, dtype=torch.int64)}
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter, dtype=dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.to(dtype)

    def run() -> list[torch.Tensor]:
        out = model(*args, **kwargs)
        if isinstance(out, dict):
            return [out["loss"]]
        return [t for t in tree_leaves(out) if t.requires_grad]
    return model, run, seq_len


@pytest.mark.parametrize("name", [*FAMILIES, *PLAIN])
def test_parameters_are_those_of_the_model(name: str, graphs: Any) -> None:
    graph = graphs(name)
    model = build_model(FAMILIES[name])[0] if name in FAMILIES else PLAIN[name]()[0]
    assert graph.num_parameters == sum(p.numel() for p in model.parameters())
    assert sum(p.numel for _, p in graph.iter_parameters() if p.trainable) == sum(
        p.numel() for p in model.parameters() if p.requires_grad)


def _flash(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    return flop_counter.sdpa_flop_count(q, k, v)


def _flash_backward(grad: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    return flop_counter.sdpa_backward_flop_count(grad, q, k, v)


@pytest.mark.parametrize("name", [*COUNTABLE, *PLAIN])
def test_flops_are_those_of_the_flop_counter(name: str, graphs: Any) -> None:
    _, run, seq_len = real(name, torch.float32)
    aten = torch.ops.aten
    extra = {aten._scaled_dot_product_flash_attention_for_cpu: _flash,
             aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward}
    with flop_counter.FlopCounterMode(display=False, custom_mapping=extra) as counter:
        outputs = run()
    forward = counter.get_total_flops()
    with flop_counter.FlopCounterMode(display=False, custom_mapping=extra) as counter:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    backward = counter.get_total_flops()
    if name == "t5":  # six of its attentions have a trained bias, which this CPU's kernel lacks:
        backward += 6 * 2 * BATCH * 4 * SEQ_LEN**2 * 16  # their scores are kept, not recomputed
    graph = graphs(name)
    assert graph.forward_flops(BATCH, seq_len) == forward
    assert graph.backward_flops(BATCH, seq_len) == backward


@pytest.mark.parametrize("name", [*(n for n in COUNTABLE if n != "t5"), *PLAIN])
def test_saved_bytes_are_those_that_autograd_saves(name: str, graphs: Any) -> None:
    model, run, seq_len = real(name, torch.bfloat16)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 0 and tensor.untyped_storage().data_ptr() not in own:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    graph = graphs(name)
    counted = sum(group.bytes_at(BATCH, seq_len, 2) for index in range(len(graph.layers))
                  for group in graph.kind_of(index).saved)
    assert counted == sum(t.untyped_storage().nbytes() for t in saved.values())
