"""What the cases plan for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.capabilities import load_capabilities


@pytest.fixture
def with_loss_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target as it would be with dynamic loss scaling: people train in fp16 on V100."""
    able = replace(load_capabilities("executor"), precisions=("fp16-mixed",))
    monkeypatch.setattr("planner.costing.load_capabilities", lambda target: able)
