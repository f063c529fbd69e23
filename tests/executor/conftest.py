"""The LayerGraphs of the tiny models, traced once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.executor import tiny


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the LayerGraphs of tiny models; see `tiny.graph`."""
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="session")
def all_graphs(graphs: Path) -> Path:
    """The same with every model traced: processes that start together must not all trace."""
    for name in tiny.FAMILIES:
        tiny.graph(name, graphs)
    return graphs
