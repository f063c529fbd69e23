"""Optimizers that torch has not, and learning-rate schedules, by hand-worked numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from executor.optimizers import Lion, make_optimizer, make_rate
from planner.request import OPTIMIZERS, Request


def test_lion_by_hand():
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = Lion([weight], lr=0.1, betas=(0.9, 0.5), weight_decay=0.2)
    weight.grad = torch.tensor([4.0, -1.0], dtype=torch.float64)
    optimizer.step()
    # 1 * (1 - 0.02) - 0.1 and -2 * 0.98 + 0.1; m = 0.5 g
    torch.testing.assert_close(weight.data, torch.tensor([0.88, -1.86], dtype=torch.float64))
    weight.grad = torch.tensor([-40.0, 1.0], dtype=torch.float64)
    optimizer.step()
    # 0.9 * 2 - 0.1 * 40 < 0: up; 0.9 * -0.5 + 0.1 < 0: up
    torch.testing.assert_close(
        weight.data, torch.tensor([0.88 * 0.98 + 0.1, -1.86 * 0.98 + 0.1], dtype=torch.float64))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fused", [True, False])
def test_every_optimizer_of_a_request_keeps_its_moments(name, fused):
    weight = nn.Parameter(torch.ones(8))
    request = Request(global_batch=1, seq_len=1, optimizer=name, fused_optimizer=fused)
    optimizer = make_optimizer(request, 0.1, 0.0)([weight])
    weight.grad = torch.ones(8)
    optimizer.step()
    assert (weight < 1).all()
    moments = [value for value in optimizer.state[weight].values()
               if isinstance(value, torch.Tensor) and value.shape == weight.shape]
    assert len(moments) == request.num_moments


def test_learning_rates():
    assert [make_rate("constant", 4, 10, 0)(s) for s in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1, 1, 1]
    linear = make_rate("linear", 2, 12, 0.5)
    assert [linear(s) for s in (1, 2, 7, 12, 99)] == [1, 1, 0.75, 0.5, 0.5]
    cosine = make_rate("cosine", 0, 10, 0.1)
    assert cosine(0) == 1
    assert cosine(5) == pytest.approx(0.55)
    assert cosine(10) == pytest.approx(0.1)
