"""The entry point of the command `plan` and of `python -m planner`."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any, NoReturn

from planner import interrupts

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line of this process and exit with its status."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `plan ... | head` ends as other tools do
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character gets "?"
    gc.set_threshold(200_000, 20, 20)  # a search makes many records, and none in cycles
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # to start more takes a tenth of a second
    # pydantic would look for plugins in the metadata of every installed distribution.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    interrupts.end_at_once()
    try:
        from planner.cli import run  # here, so that an interrupt of these imports is caught too

        status = run()
    except KeyboardInterrupt:
        print(interrupts.NOTHING_YET, file=sys.stderr)
        status = interrupts.STATUS
    interrupts.finish()
    gc.freeze()  # the process ends: to look for cycles once more takes a tenth of a second
    sys.exit(status)


if __name__ == "__main__":
    main()
