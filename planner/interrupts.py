"""What an interrupt (Ctrl-C) of the command line does.

While modules are imported and inputs read there is nothing to keep, and an exception in the middle
of an import may end in a traceback of the import system's own: the process ends at once. A search
keeps its best layout, so there an interrupt is the exception KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

__all__ = ["NOTHING_YET", "STATUS", "end_at_once", "raise_again"]

NOTHING_YET = "interrupted: there is no layout yet"
STATUS = 130
"""128 + SIGINT, as shells count."""


def _end(number: int, frame: object) -> NoReturn:
    os.write(2, f"{NOTHING_YET}\n".encode())
    os._exit(STATUS)


def end_at_once() -> None:
    """From here on an interrupt ends the process."""
    signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From here on an interrupt is an exception again, if `end_at_once` was called."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
