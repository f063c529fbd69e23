"""Work in a forked process: what it allocates, and the groups that it joins, end with it.

Every process of a torchrun job forks at the same point, so that the children are a job of their own
over the same store. Their parents have imported what is needed and joined nothing yet.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from profiler.allocator import return_freed_memory

__all__ = ["in_child", "join", "load_code", "resident_bytes", "run_alone"]

TRIAL_S = 180.0


def join(name: str, timeout_s: float = 120.0) -> None:
    """Meet the other processes under a name of this group's own: the store outlives its groups."""
    import torch.distributed as dist

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                          is_master=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=timeout_s))


def in_child(work: Callable[[], Any], timeout_s: float) -> tuple[Any, str]:
    """(what `work` returned, as JSON would have it; problem or nothing)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            said = {"found": work(), "problem": ""}
        except BaseException as error:
            said = {"found": None, "problem": f"{type(error).__name__}: "
                                              f"{' '.join(str(error).split())[:300]}"}
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], timeout_s)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read() if ready else b""
    if not text:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not text:
        return None, "it was killed" if ready else f"not done within {timeout_s:g} s"
    said = json.loads(text)
    return said["found"], said["problem"]


def resident_bytes(what: str) -> int:
    """VmHWM (the most so far), RssAnon or RssFile (now: the process's own, that of files)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").split("\n"):
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status says no {what}")


def load_code(work: Callable[[], None]) -> None:
    """Import here what `work` imports, so that no child holds it for a layout's.

    work: as of `run_alone`; what fails in it is met again there.
    """
    def rehearse() -> list[str]:
        join("rehearsal", TRIAL_S)
        with contextlib.suppress(Exception):
            work()
        return sorted(set(sys.modules) - known)

    known = set(sys.modules)
    names, _ = in_child(rehearse, TRIAL_S)
    for name in names or []:
        with contextlib.suppress(Exception):  # it was imported in another order there
            importlib.import_module(name)


def run_alone(number: int, work: Callable[[], None], cap_bytes: int) -> tuple[int | None, str]:
    """(most bytes that any process held beyond its own beginning, problem or nothing).

    Held: resident and not of a file (code).
    work: one layout's first steps, over the group that is running then.
    """
    def trial() -> int:
        import torch.distributed as dist

        return_freed_memory()
        join(f"trial{number}", TRIAL_S)
        before = resident_bytes("RssAnon")
        work()
        held: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(held, resident_bytes("VmHWM") - resident_bytes("RssFile") - before)
        return max(held)

    most, problem = in_child(trial, TRIAL_S)
    if most is not None and most > cap_bytes:
        problem = (f"above its memory cap: {most / 2**20:.0f} MiB held, "
                   f"{cap_bytes / 2**20:.0f} allowed")
    return most, problem
