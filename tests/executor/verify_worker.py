"""What `verify` starts in tests: its own worker, with the fault that the environment names.

With FAULTS as its second argument: every fault of the table in one process group, on the batch
that verify would make of the case's layout.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.compare import compare
from executor.problems import problem_of
from executor.verify import run_worker
from tests.executor import tiny
from tests.executor.fault_cases import FAULTS

FAULT = "MESHWRIGHT_TEST_FAULT"


def chosen() -> Any:
    return {case.name: case.change for case in FAULTS}[os.environ[FAULT]]


def main(folder: Path) -> None:
    if sys.argv[2:] != ["FAULTS"]:
        run_worker(folder, chosen() if FAULT in os.environ else lambda run: None)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {}
    for case in FAULTS:
        graph = tiny.graph(case.model, folder)
        layout = case.layout(graph)
        found[case.name] = asdict(compare(problem_of(graph, layout), layout, graph,
                                          change=case.change))
    if dist.get_rank() == 0:
        Path(folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
