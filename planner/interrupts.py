"""What an interrupt (Ctrl-C) of the command line does.

While modules are imported and inputs read there is nothing to keep, and an exception in the middle
of an import may end in a traceback of the import system's own: the process ends at once. A search
keeps its best layout, so there an interrupt is the exception KeyboardInterrupt. What follows,
writing and printing, is soon done and is not cut short.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

__all__ = ["NOTHING_YET", "STATUS", "end_at_once", "finish", "raise_again"]

NOTHING_YET = "interrupted: there is no layout yet"
STATUS = 130
"""128 + SIGINT, as shells count."""


def _end(number: int, frame: object) -> NoReturn:
    os.write(2, f"{NOTHING_YET}\n".encode())
    os._exit(STATUS)


def _raise(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def end_at_once() -> None:
    """From here on an interrupt ends the process."""
    signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From here on an interrupt is an exception, if `end_at_once` was called."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise)


def finish() -> None:
    """From here on an interrupt is ignored, if `end_at_once` was called."""
    if signal.getsignal(signal.SIGINT) in (_end, _raise):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
