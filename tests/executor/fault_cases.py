"""Faults put into runs on purpose: the comparison with one process must find every one."""

# ruff: noqa: C408 (keyword arguments read better in tables)
from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor

from tests.executor.cases import Case


def skip_data_sync(run: Any) -> None:
    """Each rank keeps the gradients of its own samples."""
    run.stages[0].set_requires_gradient_sync = lambda value: None
    type(run.stages[0]).set_requires_gradient_sync(run.stages[0], False)


def skip_tensor_sync(run: Any) -> None:
    """Each tensor-parallel rank keeps the norms' gradients of its own tokens."""
    for _, _, parameter in run.named_parameters():
        parameter.register_post_accumulate_grad_hook(_as_if_whole)


def _as_if_whole(parameter: Any) -> None:
    gradient = parameter.grad
    if gradient.placements != parameter.placements:
        parameter.grad = DTensor.from_local(gradient.to_local(), gradient.device_mesh,
                                            parameter.placements, run_check=False)


def drop_layer(run: Any) -> None:
    """One block returns its input."""
    for stage in run.stages.values():
        handle = stage._calls._handler

        def dropping(index: int, module: Any, forward: Any, args: Any, kwargs: Any,
                     handle: Any = handle) -> Any:
            if index == 3:
                return args[0]
            return handle(index, module, forward, args, kwargs)
        stage._calls._handler = dropping


def untie(run: Any) -> None:
    """The stages of a tied table each keep the gradient of their own use of it."""
    run.shared.clear()


def mean_of_means(run: Any) -> None:
    """The usual loss: a mean over each micro-batch, averaged over micro-batches and ranks."""
    loss, count = run.loss, run.layout.num_micro_batches

    def total(outputs: Any, targets: Any) -> Any:
        return loss.total(outputs, targets) / loss.count(targets)
    run.loss = replace(loss, total=total, count=lambda targets: float(count))
    for stage in run.stages.values():
        stage._loss = run.loss


def scale_loss(run: Any) -> None:
    """A count of loss terms that is off by a thousandth."""
    count = run.loss.count
    run.loss = replace(run.loss, count=lambda targets: 1.001 * count(targets))


FAULTS = [
    Case(name="skipped data-parallel sync", model="gpt2", mesh=dict(dp_shard=2),
         change=skip_data_sync),
    Case(name="skipped tensor-parallel sync", model="gpt2", mesh=dict(tp=2),
         change=skip_tensor_sync),
    Case(name="dropped layer", model="gpt2", mesh=dict(dp_shard=2), change=drop_layer),
    Case(name="untied embedding", model="gpt2", mesh=dict(pp=2), change=untie),
    Case(name="mean of means", model="gpt2", mesh=dict(dp_shard=2), change=mean_of_means),
    Case(name="wrong loss scale", model="gpt2", mesh=dict(dp_shard=2), change=scale_loss),
]
