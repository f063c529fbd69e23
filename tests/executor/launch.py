"""Starting processes in tests: a hard limit on time, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run_group(command: list[str], limit_s: float) -> tuple[int, str]:
    """(exit status, output) of a command; it and all it started are killed at the limit."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                                "TRANSFORMERS_VERBOSITY": "error"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return 124, output + f"\n(killed after {limit_s} s)"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def torchrun(processes: int, module: str, *args: str, limit_s: float = 300) -> tuple[int, str]:
    """Run a Python module in `processes` local processes; torchrun picks a free port."""
    return run_group([sys.executable, "-m", "torch.distributed.run", "--standalone",
                      f"--nproc-per-node={processes}", "-m", module, *args], limit_s)
