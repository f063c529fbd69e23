"""Random numbers (dropout) under parallelism.

Ranks that compute on different data draw different numbers: each rank's own stream, seeded by its
place. Tensor-parallel ranks that compute the same thing (a layer held whole) must draw the same
numbers: they leave their own stream for one that is common to the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from executor.mesh import AXIS_NAMES, ParallelMesh

__all__ = ["RandomStreams"]


@dataclass(slots=True)
class RandomStreams:
    """The random state of this rank."""

    mesh: ParallelMesh
    _common: list[torch.Tensor] = field(default_factory=list)

    def seed(self, seed: int, step: int) -> None:
        """Start both streams for a step; seed and step are alike on every rank."""
        place = [self.mesh.coordinate(axis) for axis in AXIS_NAMES]
        if self.mesh.spec.tp > 1:
            _seed(_mixed(seed, [step, *place[:-1], -1]), self.mesh.device)
            self._common = _states(self.mesh.device)
        _seed(_mixed(seed, [step, *place]), self.mesh.device)

    @contextmanager
    def common(self) -> Iterator[None]:
        """Within it, tensor-parallel ranks draw the same numbers."""
        if not self._common:
            yield
            return
        own = _states(self.mesh.device)
        _restore(self._common, self.mesh.device)
        try:
            yield
        finally:
            self._common = _states(self.mesh.device)
            _restore(own, self.mesh.device)


def _mixed(seed: int, place: list[int]) -> int:
    """One number out of seed and place (FNV-1a over the integers)."""
    mixed = 0xCBF29CE484222325
    for item in (seed, *place):
        mixed = ((mixed ^ (item & 0xFFFFFFFF)) * 0x100000001B3) & 0x7FFFFFFFFFFFFFFF
    return mixed


def _seed(number: int, device: torch.device) -> None:
    """What torch.manual_seed does for these devices; it formats a stack for each kind it lacks."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def _states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _restore(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
