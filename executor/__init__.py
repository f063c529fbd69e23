"""Runs a Layout on torch.distributed, exactly as the model alone would run.

Importing this package does not import torch: the planner reads `executor/capabilities.json`.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Deferred", "Loss", "Run", "cross_entropy", "mean_squared_error", "parallelize"]

_HOMES = {"Deferred": "executor.deferred", "Loss": "executor.losses", "Run": "executor.run",
          "cross_entropy": "executor.losses", "mean_squared_error": "executor.losses",
          "parallelize": "executor.parallelize"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'executor' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # else the submodule of the same name would stand in its place
    return value
