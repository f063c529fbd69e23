"""The LayerGraphs of the tiny models, traced once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.executor import tiny


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the LayerGraph of every tiny model."""
    folder = tmp_path_factory.mktemp("graphs")
    for name in tiny.FAMILIES:
        tiny.graph(name, folder)
    return folder
