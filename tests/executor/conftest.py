"""The LayerGraphs of the tiny models, traced once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.executor import tiny


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the LayerGraphs of tiny models; see `tiny.graph`. pytest's workers share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "graphs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def all_graphs(graphs: Path) -> Path:
    """The same with every model traced: processes that start together must not all trace."""
    # Two workers meet in the middle.
    backwards = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
    for name in reversed(tiny.FAMILIES) if backwards else tiny.FAMILIES:
        tiny.graph(name, graphs)
    return graphs
