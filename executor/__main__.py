"""The executor's command line.

    torchrun --nproc-per-node 4 -m executor train layout.json --steps 50
    python -m executor verify layout.json
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from profiler.errors import Interrupted, MeshwrightError

LOST = 4
"""Exit status of a rank that lost the others."""


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    pass


@commands.command("train")
@click.argument("layout")
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True,
              help="The step to train up to.")
@click.option("--model", help="Where its model is: a config.json, package.module:function.")
@click.option("--data", metavar="SOURCE", help="A file of token ids, one after the other, or "
              "package.module:function, called with (first sample, number of samples) for (inputs, "
              "targets). [synthetic]")
@click.option("--data-dtype", type=click.Choice(["uint16", "uint32"]),
              help="How a file holds tokens. [by vocabulary]")
@click.option("--loss", type=click.Choice(["cross-entropy", "mean-squared-error"]),
              help="[the one that the model's function names, else cross-entropy]")
@click.option("--lr", "learning_rate", type=click.FloatRange(min=0, min_open=True), default=3e-4,
              show_default=True, help="Learning rate. The optimizer is the layout's.")
@click.option("--lr-schedule", type=click.Choice(["constant", "linear", "cosine"]),
              default="constant", show_default=True, help="How it falls until --steps.")
@click.option("--lr-floor", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="Share of the learning rate at which it ends.")
@click.option("--warmup", type=click.IntRange(min=0), default=0, help="Steps of linear warm-up.")
@click.option("--weight-decay", type=click.FloatRange(min=0), default=0.01, show_default=True)
@click.option("--max-norm", type=click.FloatRange(min=0, min_open=True), default=1.0,
              show_default=True, help="Gradients are clipped to this global norm.")
@click.option("--seed", type=int, default=0, help="Of weights and dropout.")
@click.option("--metrics", metavar="FILE", help="Append the metrics of each step as JSON lines.")
@click.option("--tensorboard", metavar="FOLDER", help="Write the metrics for TensorBoard too.")
@click.option("--report", metavar="FILE", help="Write the last table, predicted against measured, "
              "as JSON too.")
@click.option("--save", metavar="FOLDER", help="Save checkpoints here (at the end at least).")
@click.option("--save-every", type=click.IntRange(min=0), default=0, help="Steps between them.")
@click.option("--save-async", is_flag=True, help="Train on while checkpoints are written.")
@click.option("--resume", is_flag=True, help="Go on from the last whole checkpoint in --save.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[cuda where there is one]")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=600.0,
              show_default=True, help="Seconds that a rank waits for the others.")
def _train(**options: Any) -> None:
    """Train as LAYOUT says, on the processes that torchrun started."""
    from executor.train import Options, train

    train(Options(**options))


@commands.command("verify")
@click.argument("layout")
@click.option("--model", help="Where its model is: a config.json, package.module:function.")
@click.option("--max-processes", type=click.IntRange(min=1, max=64), default=8, show_default=True,
              help="CPU processes to start at most.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=300.0,
              show_default=True, help="Seconds before it is given up.")
def _verify(layout: str, model: str | None, max_processes: int, timeout_s: float) -> None:
    """Prove on CPU processes that LAYOUT, shrunk, computes what one process computes."""
    from executor.verify import verify

    raise SystemExit(0 if verify(layout, model, max_processes, timeout_s) else 1)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command; one clear message for anything a user, or a lost rank, can cause."""
    rank = os.environ.get("RANK")
    where = f"rank {rank}: " if rank is not None else ""
    try:
        commands.main(args=arguments, prog_name="executor", standalone_mode=False)
        status = 0
    except MeshwrightError as error:
        print(f"{where}error: {error}", file=sys.stderr, flush=True)
        status = error.exit_status
    except click.ClickException as error:
        error.show()
        status = 2
    except (KeyboardInterrupt, click.exceptions.Abort):
        print(f"{where}interrupted", file=sys.stderr, flush=True)
        status = Interrupted.exit_status
    except Exception as error:
        cause = _lost(error)
        if cause is None:
            raise
        print(f"{where}lost contact with another rank ({cause[:160]}); ending. Start again with "
              f"--resume to go "
              f"on from the last whole checkpoint", file=sys.stderr, flush=True)
        status = LOST
    if rank is not None:
        # An orderly end would wait for ranks that are gone; and where all are well, threads of the
        # process groups that are still alive now and then abort the interpreter's teardown.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _lost(error: BaseException) -> str | None:
    """The reason, if the error (or one that caused it) says that a peer is gone; else None."""
    signs = ("Connection closed by peer", "Connection reset", "Timed out waiting", "timed out",
             "Broken pipe", "NCCL", "Read error", "Socket closed", "TCPStore")
    current: BaseException | None = error
    while current is not None:
        text = " ".join(str(current).split())
        if any(sign in text for sign in signs):
            start = max(0, min(text.find(s) for s in signs if s in text))
            return text[start:]
        current = current.__cause__ or current.__context__
    return None


if __name__ == "__main__":
    main()
