"""Which loss a model is trained with: the one that it was planned with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from executor.losses import Loss
from executor.models import make_loss
from executor.parallelize import _traced
from planner import plan
from profiler.errors import InvalidInput
from profiler.layer_graph import ModelSource
from profiler.trace import trace, trace_function

OWN = Loss(total=lambda predictions, targets: (predictions - targets).abs().sum(),
           count=lambda targets: float(targets.numel()))


def model() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.zeros(8, 16)


def regression() -> tuple[nn.Module, torch.Tensor, str]:
    return (*model(), "mean-squared-error")


def own() -> tuple[nn.Module, torch.Tensor, Loss, torch.Tensor]:
    return (*model(), OWN, torch.zeros(8, 4))


def test_the_loss_of_the_function_is_taken():
    graph = trace_function(f"{__name__}:regression")
    assert make_loss(graph, None).name == "mean-squared-error"
    assert make_loss(graph, "mean-squared-error").name == "mean-squared-error"
    assert make_loss(trace_function(f"{__name__}:own"), None) is OWN
    for source in (ModelSource(), ModelSource(loss="none"), ModelSource(loss="module")):
        assert make_loss(replace(graph, source=source), None).name == "cross-entropy"


@pytest.mark.parametrize(("function", "traced"), [("regression", "mean-squared"), ("own", "own")])
def test_another_loss_than_planned_is_refused(function, traced):
    with pytest.raises(InvalidInput, match=rf"--loss cross-entropy.*planned with.*{traced}"):
        make_loss(trace_function(f"{__name__}:{function}"), "cross-entropy")


@pytest.mark.parametrize("planned_with", [None, "mean-squared-error"])
def test_a_module_is_found_again_with_or_without_its_loss(planned_with):
    module, inputs = model()
    layout = plan(module, "local:1", global_batch=8, precision="fp32", example_inputs=inputs,
                  loss=planned_with)
    graph = _traced(module, layout, inputs, Loss(total=OWN.total, count=OWN.count,
                                                 name="mean-squared-error"))
    assert graph.source.loss == (planned_with or "none")


def test_a_loss_of_a_model_that_has_its_own_is_refused():
    with pytest.raises(InvalidInput, match=r"^loss: of an nn.Module alone; the model is named"):
        plan("gpt2", "local:1", global_batch=8, seq_len=64, loss="cross-entropy")
    with pytest.raises(InvalidInput, match=r"^example_inputs and loss: .*the model is a Layer"):
        plan(trace_function(f"{__name__}:regression"), "local:1", global_batch=8,
             example_inputs=torch.zeros(8, 16), loss="cross-entropy")
    with pytest.raises(InvalidInput, match="a function returns them beside its module"):
        trace(model, name="model", loss="cross-entropy")
