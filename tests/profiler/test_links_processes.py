"""`profiler links` between two processes, and what the planner makes of its document."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.link_fits import with_links
from planner.topology_files import resolve
from planner.topology_groups import Placement
from profiler.__main__ import commands
from profiler.documents import load
from profiler.links import COLLECTIVES, Links

ROOT = Path(__file__).parent.parent.parent


def test_unknown_collectives_are_named() -> None:
    done = CliRunner().invoke(commands, ["links", "--collectives", "all-reduce,gather", "-o", "x"])
    assert done.exit_code == 2
    assert "there are all-reduce, all-gather, reduce-scatter, all-to-all, send" in done.output


@pytest.mark.processes
def test_links_between_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "profiler", "links", "-q", "--sizes", "4096,262144,1048576", "--repeats", "5",
         "--most-seconds", "0.05", "-o", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        timeout=240)
    assert done.returncode == 0, done.stderr
    assert "all-reduce" in done.stdout
    links = load(Links, path)
    assert {fit.collective for fit in links.fits} == set(COLLECTIVES)
    assert (links.backend, links.processes_per_host, links.num_hosts) == ("gloo", 2, 1)
    for fit in links.fits:
        assert [point.num_bytes for point in fit.points] == [4096, 262144, 1048576]
        assert (links.overlap_slowdown or 0.0) >= 1.0
        assert all(point.low_s <= point.median_s for point in fit.points)
    placed = with_links(resolve("local:2"), links)
    assert placed.hosts[0].device.overlap_slowdown == 2.0  # FSDP2 waits for gloo
    span = Placement(placed, 2).span(2)
    assert span.fits is not None
    assert span.fits.source("all_reduce", 300_000) == "measured"
