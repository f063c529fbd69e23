"""Dropout: unlike where data are unlike, alike where ranks compute alike, same when recomputed."""

import pytest

from tests.executor import tiny
from tests.executor.launch import torchrun


@pytest.mark.processes
def test_dropout_masks(graphs):
    tiny.graph("gpt2", graphs)
    status, output = torchrun(2, "tests.executor.dropout_worker", str(graphs), limit_s=90)
    assert status == 0, output[-4000:]
