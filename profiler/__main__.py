"""Measure what layers, devices and links cost.

    python -m profiler model llama3-8b --seq-len 8192 --micro-batch 1,2 -o llama3-8b.profile.json
    python -m profiler device -o my-gpu.json
    torchrun --nproc-per-node 8 -m profiler links -o links.json

CUDA where there is one, else CPU. Under torchrun, `model` measures on all processes at once: the
load of a training run.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from profiler.errors import Interrupted, MeshwrightError

DTYPES = ("float32", "bfloat16", "float16")

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of allocations before profiling
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")


class _Counts(click.ParamType):  # type: ignore[type-arg]
    """Positive whole numbers with commas between them."""

    name = "N[,N...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdigit() and 0 < int(part) < 2**31 for part in parts):
            self.fail(f"{value!r}: positive whole numbers are needed, such as 1,2,4", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


COUNTS = _Counts()


class _Collectives(click.ParamType):  # type: ignore[type-arg]
    """Names of collectives with commas between them."""

    name = "NAME[,NAME...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        from profiler.links import COLLECTIVES

        found = tuple(part.strip().replace("-", "_") for part in str(value).split(","))
        wrong = [name for name in found if name not in COLLECTIVES]
        if wrong:
            known = ", ".join(name.replace("_", "-") for name in COLLECTIVES)
            self.fail(f"{value!r}: there are {known}", param, ctx)
        return tuple(name for name in COLLECTIVES if name in found)


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    pass


def _check_output(path: str) -> None:
    from profiler.errors import InvalidInput

    folder = Path(path).resolve().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidInput(f"{path}: cannot be written there")


@commands.command("model")
@click.argument("model")
@click.option("--seq-len", "seq_lens", type=COUNTS, default=(), help="Tokens per sample.")
@click.option("--micro-batch", "micro_batches", type=COUNTS, default="1", show_default=True,
              help="Samples in a micro-batch.")
@click.option("--tensor-parallel", "degrees", type=COUNTS, default="1", show_default=True,
              help="Degrees; 1 is always measured.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the computation. "
              "[bfloat16 on CUDA, float32 on CPU]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[cuda where there is one]")
@click.option("--device-name", metavar="NAME", help="The device file that it is about. [by name]")
@click.option("--threads", type=click.IntRange(min=1), help="Of each process, on CPU.")
@click.option("--optimizer", "optimizers", type=click.Choice(["adamw", "sgd", "sgd-momentum"]),
              multiple=True, default=["adamw"], show_default=True, help="May be repeated.")
@click.option("--error", type=click.FloatRange(min=0.0001, max=0.5), default=0.01,
              show_default=True, help="Repeat until the median is known to this share of itself.")
@click.option("--most-seconds", "most_s", type=click.FloatRange(min=0.1), default=20.0,
              show_default=True, help="For one case.")
@click.option("--least-repeats", "least", type=click.IntRange(min=1), default=5,
              show_default=True, help="Of one case, however long they take.")
@click.option("--compile", is_flag=True, help="Run each layer through torch.compile.")
@click.option("--memory/--no-memory", default=True, help="Measure bytes as well. [yes]")
@click.option("--restart", is_flag=True, help="Forget what an interrupted run has measured.")
@click.option("--no-progress", "--quiet", "-q", "quiet", is_flag=True, help="No progress bar.")
@click.option("--output", "-o", required=True, metavar="FILE", help="Write the profile here.")
def _model(dtype: str | None, **fields: Any) -> None:
    """Measure the distinct layers of MODEL: a name, a config.json, package.module:function."""
    from profiler.hardware import pick_device
    from profiler.model_command import ModelOptions, profile_model

    _check_output(fields["output"])
    cuda = pick_device(fields["device"]).type == "cuda"
    done = profile_model(ModelOptions(
        dtype=dtype or ("bfloat16" if cuda else "float32"), **fields))
    if int(os.environ.get("RANK", 0)) == 0:
        profile = done.profiles[-1]
        loose = sum(not row.settled for row in profile.layers)
        from profiler.memory_agreement import agreement_lines

        click.echo(f"{len(profile.layers)} cases of {len(done.kinds)} kinds of layer measured on "
                   f"{profile.hardware}, {loose} of them with a larger spread than asked for, "
                   f"{len(profile.failures)} could not be; written to {fields['output']}")
        for line in agreement_lines(done, profile):
            click.echo(line)


@commands.command("device")
@click.option("--name", help="Of the device. [the shipped file's of this hardware]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[cuda where there is one]")
@click.option("--threads", type=click.IntRange(min=1), help="Of each process, on CPU.")
@click.option("--error", type=click.FloatRange(min=0.0001, max=0.5), default=0.02,
              show_default=True, help="Repeat until the median is known to this share of itself.")
@click.option("--most-seconds", "most_s", type=click.FloatRange(min=0.05), default=2.0,
              show_default=True, help="For one point of a curve.")
@click.option("--no-progress", "--quiet", "-q", "quiet", is_flag=True, help="No progress bar.")
@click.option("--output", "-o", required=True, metavar="FILE", help="Write the device here.")
def _device(output: str, quiet: bool, **fields: Any) -> None:
    """Measure the curves of a device file on this device."""
    _check_output(output)
    from profiler.documents import dump, write_atomically
    from profiler.measure_device import DeviceOptions, measure_device
    from profiler.model_command import progress_bar

    first = int(os.environ.get("RANK", 0)) == 0
    with progress_bar(quiet or not first, 40) as advance:
        made, busy = measure_device(DeviceOptions(**fields), advance)
    if first:
        write_atomically(output, dump(made))
        best = max(made.peak_flops_per_s.values())
        click.echo(f"{made.description}: {best / 1e12:.3g} TFLOP/s at most, "
                   f"{made.memory_bandwidth_bytes_per_s / 1e9:.3g} GB/s, "
                   f"{made.kernel_launch_s * 1e6:.3g} us a launch; written to {output}")
        for note in busy:
            click.echo(f"note: {note}", err=True)


@commands.command("links")
@click.option("--max-bytes", "most_bytes", type=click.IntRange(min=2**20, max=2**34),
              default=64 * 2**20, show_default=True, help="The largest message.")
@click.option("--sizes", type=COUNTS, default=(), help="Bytes of the messages, instead of powers "
              "of two; two or more.")
@click.option("--most-seconds", "most_s", type=click.FloatRange(min=0.05), default=2.0,
              show_default=True, help="For one size of one collective.")
@click.option("--repeats", type=click.IntRange(min=5), default=100, show_default=True,
              help="Of one size, at most.")
@click.option("--collectives", type=_Collectives(), help="Only these. The others are then "
              "priced analytically.  [all]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[cuda where there is one]")
@click.option("--no-progress", "--quiet", "-q", "quiet", is_flag=True, help="No progress bar.")
@click.option("--output", "-o", required=True, metavar="FILE", help="Write the links here.")
def _links(output: str, quiet: bool, **fields: Any) -> None:
    """Measure every collective between the processes that torchrun started."""
    from profiler.errors import InvalidInput

    _check_output(output)
    if len(fields["sizes"]) == 1:
        raise InvalidInput("--sizes: a line needs two sizes or more")
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise InvalidInput("links are between processes: start it with torchrun "
                           "--nproc-per-node N -m profiler links ...")
    if fields["collectives"] is None:
        del fields["collectives"]
    from profiler.links_command import write_links

    write_links(output, quiet, **fields)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command; one clear message for anything a user can cause."""
    try:
        commands.main(args=arguments, prog_name="python -m profiler", standalone_mode=False)
        status = 0
    except MeshwrightError as error:
        print(f"{'interrupted' if isinstance(error, Interrupted) else 'error'}: {error}",
              file=sys.stderr, flush=True)
        status = error.exit_status
    except click.ClickException as error:
        error.show()
        status = 2
    except (KeyboardInterrupt, click.exceptions.Abort):
        print("interrupted: nothing is measured yet", file=sys.stderr, flush=True)
        status = Interrupted.exit_status
    sys.exit(status)


if __name__ == "__main__":
    main()
