"""What the C library does with freed memory: to keep it makes steps on CPUs faster and alike.

By default glibc gives large freed blocks back to the kernel, and a training step on CPUs asks for
all its activations anew: thousands of page faults, zeroing included, in every step. The seconds
that they take depend on what else the process holds: a layer that is timed alone, over and over,
has none. The functions below do nothing where the C library is not glibc.
"""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["keep_freed_memory", "return_freed_memory"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Of malloc.h."""
SMALLEST_MAPPED = 2**16
"""Bytes from which a block is mapped by itself, and returned when it is freed."""


def keep_freed_memory() -> None:
    """Let this process, and those that it forks, use freed memory again instead of returning it."""
    _set((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1))


def return_freed_memory() -> None:
    """Let it return freed blocks of 64 KiB and more at once, so that resident bytes are in use.

    Of a process that has kept freed memory before, not all are.
    """
    _set((M_MMAP_THRESHOLD, SMALLEST_MAPPED), (M_TRIM_THRESHOLD, SMALLEST_MAPPED))


def _set(*options: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in options:
            mallopt(name, value)
