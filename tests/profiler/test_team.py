"""What seconds are counted by where processes share cores."""

from __future__ import annotations

import time

import pytest
import torch

from profiler.team import SHARED, Team

CPU = torch.device("cpu")


class Pair(Team):
    """Two processes, of which this is one."""

    def __init__(self, stretch: float) -> None:
        super().__init__(2, 0)
        self.stretch = stretch

    def _stretch(self) -> float:
        return self.stretch

    def mean(self, values: object) -> list[float]:
        return [self.stretch]


@pytest.mark.parametrize("team", [Team(1, 0), Pair(1.0), Pair(SHARED - 0.01)])
def test_the_wall_counts_where_cores_are_not_shared(team: Team, monkeypatch: pytest.MonkeyPatch
                                                    ) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert team.timer(CPU) is time.perf_counter


def test_own_seconds_count_where_they_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    timer = Pair(2.5).timer(CPU)
    monkeypatch.setattr(time, "process_time", lambda: 4.0)
    assert timer() == 10.0


def test_accelerators_and_several_threads_have_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Pair(2.0).timer(torch.device("cuda")) is time.perf_counter
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert Pair(2.0).timer(CPU) is time.perf_counter
