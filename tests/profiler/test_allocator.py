"""Freed memory is kept, or returned, as it was asked for."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT = """
import resource, sys
import torch
from profiler import allocator

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

getattr(allocator, sys.argv[1])()
faults()
print(faults())
"""
PAGES = 10 * 2**24 // 4096
"""Of ten tensors of 16 MiB; fewer where pages are huge."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the functions are of glibc")
def test_freed_memory_is_kept_or_returned_as_asked():
    kept, returned = (int(subprocess.run([sys.executable, "-c", COUNT, name], text=True, check=True,
                                         capture_output=True).stdout)
                      for name in ("keep_freed_memory", "return_freed_memory"))
    assert kept < PAGES // 1000
    assert returned > PAGES // 600
