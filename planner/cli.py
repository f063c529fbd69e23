"""The command `plan`.

The first word is a command (check, scale, launch, models, topologies, schema), or else a MODEL.
Results go to standard output, everything else to standard error. Exit status: 0 planned, 2 invalid
input, 3 nothing fits, 130 interrupted with nothing to show; `check`: 2 illegal, 3 does not fit.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from planner import __version__, interrupts
from planner.capabilities import RecomputeMode, ScheduleName
from planner.request import OPTIMIZERS, PRECISIONS, Request
from planner.stacks import stack_names
from profiler.documents import dump, write_atomically
from profiler.errors import Infeasible, InternalError, Interrupted, InvalidInput, MeshwrightError

if TYPE_CHECKING:
    from planner.layout import Layout

__all__ = ["run"]

DOCUMENTS = {
    "layout": ("planner.layout", "Layout"),
    "layer-graph": ("profiler.layer_graph", "LayerGraph"),
    "topology": ("planner.topology", "Topology"),
    "device": ("profiler.device", "Device"),
    "links": ("profiler.links", "Links"),
    "request": ("planner.request", "Request"),
}
DEFAULTS = Request.__dataclass_fields__

EXAMPLES = """\b
Examples:
  plan llama3-8b --topology dgx-h100:2 --global-batch 256 --seq-len 8192 -o layout.json
  plan ./config.json --topology cluster.yaml --global-batch 64 --seq-len 4096 --tp 4
  plan mypkg.models:build --topology local --global-batch 32
  plan check layout.json"""


class _ModelContext(click.Context):
    """The command that a MODEL stands for has no name of its own."""

    @property
    def command_path(self) -> str:
        return self.parent.command_path if self.parent else "plan"


class _ModelCommand(click.Command):
    context_class = _ModelContext


class _Plan(click.Group):
    """Runs the command of the first word, or plans the MODEL that it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {*self.commands, "--help", "-h", "--version"}
        if args and args[0] not in own:
            args = ["model", *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "MODEL --topology T --global-batch N [OPTIONS]")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...", prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.commands["model"].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


@click.group(cls=_Plan, epilog=EXAMPLES, context_settings={
    "help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="meshwright %(version)s")
def commands() -> None:
    """Find the fastest way to spread the training of MODEL over many devices, and prove it.

    MODEL is a name of the catalogue (`plan models`), a Hugging Face config.json, a LayerGraph
    file, or package.module:function, which returns an nn.Module and example inputs.
    """


def _count(name: str, text: str) -> Callable[..., Any]:
    return click.option(name, type=click.IntRange(min=1), metavar="N", help=text)


def _request_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The fields of a Request as options; one that is not given leaves the field at its default."""
    options = [
        _count("--global-batch", "Samples per optimizer step."),
        _count("--seq-len", "Tokens per sample."),
        click.option("--precision", type=click.Choice(list(PRECISIONS)),
                     help=f"Default {DEFAULTS['precision'].default}."),
        click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)),
                     help=f"Default {DEFAULTS['optimizer'].default}."),
        click.option("--fused-optimizer/--unfused-optimizer", default=None,
                     help="Whether the update needs no temporary copies. Default fused."),
        click.option("--memory-margin", type=click.FloatRange(0, 0.9), metavar="SHARE",
                     help="Share of each device's memory to leave free. "
                          f"Default {DEFAULTS['memory_margin'].default}."),
        click.option("--for", "target", metavar="ENGINE", help="What will run the layout. "
                     f"Default {DEFAULTS['target'].default}."),
        click.option("--stack", type=click.Choice(stack_names()), metavar="STACK",
                     help="The software whose kernels and overlap are priced: "
                          f"{', '.join(stack_names())}. Default: the engine's."),
        click.option("--sequence-parallel/--no-sequence-parallel", default=None,
                     help="Divide activations between tensor-parallel regions. "
                          "Default: where the engine can."),
        _count("--pp", "Fix the number of pipeline ranks."),
        _count("--tp", "Fix the tensor-parallel degree."),
        _count("--dp-shard", "Fix the ranks that share parameters (FSDP)."),
        _count("--dp-replicate", "Fix the number of replicas."),
        _count("--micro-batch", "Fix the samples in a micro-batch."),
        click.option("--schedule", type=click.Choice(get_args(ScheduleName)),
                     help="Fix the pipeline schedule."),
        click.option("--recompute", type=click.Choice(get_args(RecomputeMode)),
                     help="Fix the recompute of every layer."),
        click.option("--use-all-devices", is_flag=True, default=None,
                     help="Leave no device idle, even if fewer would be faster."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@commands.command("model", cls=_ModelCommand, hidden=True, epilog=EXAMPLES)
@click.argument("model")
@click.option("--topology", "-t", metavar="T", help="A preset and its number of hosts "
              "(dgx-h100:2), a file, or 'local': this machine.")
@click.option("--links", metavar="FILE", help="Measured collectives of these devices, as "
              "`python -m profiler links` writes them.")
@_request_options
@click.option("--output", "-o", metavar="FILE", help="Write the layout here.")
@click.option("--json", "as_json", is_flag=True,
              help="Print the layout as JSON instead of the report.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="Stop the search then, with the best layout so far.")
@click.option("--no-progress", "--quiet", "-q", "quiet", is_flag=True,
              help="Show no progress line.")
def _model(model: str, topology: str | None, links: str | None, output: str | None, as_json: bool,
           time_limit: float | None, quiet: bool, **fields: Any) -> None:
    """Plan MODEL: find its fastest layout over the devices of a topology."""
    from planner import inputs, models, search, topology_files
    from planner.link_fits import with_links
    from planner.report.live import progress_line

    given = {name: value for name, value in fields.items() if value is not None}
    if output is not None:
        _check_writable(Path(output))
    if missing := [f"{option} is needed" for option, value in
                   (("--topology", topology), ("--global-batch", given.get("global_batch")))
                   if value is None]:
        raise InvalidInput(_all_problems(lambda: models.resolve(model), missing))
    devices = topology_files.resolve(str(topology))
    if links is not None:
        devices = with_links(devices, links)
    graph, name = inputs.resolve_model(model)
    request = inputs.make_request(graph, given)
    started = time.perf_counter()
    interrupts.raise_again()
    with progress_line(quiet) as progress:
        layout = search.search(graph, devices, request, progress=progress, time_limit_s=time_limit,
                               model_name=name,
                               topology_name=inputs.topology_name(str(topology), devices))
    interrupts.finish()
    wall_s = time.perf_counter() - started
    if links is not None:
        layout = replace(layout, links=inputs.links_reference(links, devices))
    if output is not None:
        _write(Path(output), dump(layout))
    if as_json:
        click.echo(dump(layout), nl=False)
        return
    from planner.report import print_plan

    print_plan(layout, graph, devices, wall_s=wall_s)
    if output is None:
        click.echo("\nNot saved: with -o layout.json the layout is written to that file.")
    else:
        click.echo(f"\nWritten to {output}.")


def _all_problems(resolve: Callable[[], Any], problems: list[str]) -> list[str]:
    """A mistyped command looks like a MODEL without its options: the name comes first."""
    try:
        resolve()
    except InvalidInput as error:
        return [*error.problems, *problems]
    return problems


@commands.command("check")
@click.argument("layout")
@click.option("--model", "-m", metavar="MODEL", help="Price it for this model instead of its own.")
@click.option("--topology", "-t", metavar="T", help="Price it for this topology instead.")
@click.option("--links", metavar="FILE", help="Measured collectives to price it with.")
@click.option("--json", "as_json", is_flag=True,
              help="Print the layout with its prediction as JSON instead of the report.")
def _check(layout: str, model: str | None, topology: str | None, links: str | None,
           as_json: bool) -> int:
    """Price any LAYOUT file, hand-written ones too: is it legal, does it fit, how fast is it?"""
    from planner import inputs

    checked = inputs.check(Path(layout), model, topology, links=links)
    if as_json:
        click.echo(dump(checked.layout), nl=False)
    else:
        from planner.report import print_check

        print_check(checked.layout, checked.graph, checked.topology)
    over = _overflows(checked.layout)
    if over and as_json:
        _say("error", over)
    return Infeasible.exit_status if over else 0


def _overflows(layout: Layout) -> list[str]:
    from planner.report.verdict import overflows

    return overflows(layout)


@commands.command("scale")
@click.argument("model")
@click.option("--topology", "-t", metavar="PRESET", required=True,
              help="The preset of one host, for example dgx-h100.")
@click.option("--devices", "-n", metavar="N,N,...", required=True,
              help="Numbers of devices, for example 8,64,512.")
@_request_options
@click.option("--samples-per-device", type=click.FloatRange(min=0, min_open=True), metavar="N",
              help="Let the batch grow with the devices, instead of --global-batch.")
@click.option("--plot", metavar="FILE", help="Draw samples/s against devices (.png, .svg, .pdf).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every layout, instead.")
def _scale(model: str, topology: str, devices: str, samples_per_device: float | None,
           plot: str | None, as_json: bool, **fields: Any) -> None:
    """Plan MODEL for several numbers of devices: how near to linear, and what takes the rest."""
    from planner import inputs
    from planner.report import scale as report
    from planner.scale import scale

    counts = _numbers(devices)
    if plot is not None:
        _check_writable(Path(plot))
        report.check_plot(Path(plot))
    graph, name = inputs.resolve_model(model)
    given = {key: value for key, value in fields.items() if value is not None}
    shown = sys.stderr.isatty()
    points = scale(graph, name, topology, counts, given, samples_per_device=samples_per_device,
                   progress=(lambda n: click.echo(f"planning for {n:,} devices ...", err=True))
                   if shown else None)
    if as_json:
        import json

        click.echo(json.dumps(report.as_data(points), indent=1))
    else:
        report.print_scale(points, name, topology)
    if plot is not None:
        report.write_plot(Path(plot), points, name, topology)


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 2**31 for part in parts):
        raise InvalidInput(f"--devices {text[:80]!r}: whole numbers joined by commas are needed, "
                           "for example 8,64,512")
    return [int(part) for part in parts]


@commands.command("launch")
@click.argument("layout")
@click.argument("train", nargs=-1, type=click.UNPROCESSED)
@click.option("--topology", "-t", metavar="T", help="Launch on this topology instead of its own.")
@click.option("--job-name", default="meshwright", show_default=True)
@click.option("--partition", metavar="NAMES", help="Slurm partition.")
@click.option("--time", metavar="TIME", help="Slurm's limit on the run time, as 12:00:00.")
@click.option("--port", type=int, default=29500, show_default=True,
              help="Where host 0 listens for the others.")
@click.option("--output", "-o", metavar="FILE", help="Write the script here.")
def _launch(layout: str, train: tuple[str, ...], topology: str | None, output: str | None,
            **options: Any) -> None:
    """Print a Slurm script that runs LAYOUT, and the torchrun command of each host.

    What follows -- is passed on: plan launch layout.json -- --steps 1000 --save ckpt
    """
    from planner import launch, topology_files
    from planner.layout import Layout
    from profiler.documents import load

    if output is not None:
        _check_writable(Path(output))
    wanted = load(Layout, layout)
    if topology is not None:
        wanted = replace(wanted, topology=replace(wanted.topology, digest=None))
    text = launch.script(wanted, topology_files.resolve(topology or wanted.topology.name),
                         launch.Launch(path=layout, train=train, **options))
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(Path(output), text)


@commands.command("models")
def _models() -> None:
    """List the models of the catalogue."""
    from planner.report.catalogue import models

    click.echo(models())


@commands.command("topologies")
@click.argument("name", required=False)
def _topologies(name: str | None) -> None:
    """List the presets, or show the topology NAME: a preset, a file, or 'local'."""
    from planner.report import catalogue

    click.echo(catalogue.topologies() if name is None else catalogue.topology(name))


@commands.command("schema")
@click.argument("document", type=click.Choice(list(DOCUMENTS)))
def _schema(document: str) -> None:
    """Print the JSON Schema of a DOCUMENT."""
    import importlib
    import json

    from profiler.documents import schema

    home, name = DOCUMENTS[document]
    click.echo(json.dumps(schema(getattr(importlib.import_module(home), name)), indent=1))


def _check_writable(path: Path) -> None:
    """Refuse an output that cannot be written before the time for a search is spent."""
    problem = None
    if path.is_dir():
        problem = "is a directory"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif not all(os.access(place, os.W_OK) for place in _places(path)):
        problem = "permission denied"
    if problem:
        raise InvalidInput(f"{path}: cannot be written: {problem}")


def _places(path: Path) -> list[Path]:
    """What must be writable: a file is replaced in its folder, a pipe or device is written to."""
    if not path.exists():
        return [path.parent]
    return [path, path.parent] if path.is_file() else [path]


def _write(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():  # /dev/stdout, a named pipe: nothing to replace
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"{path}: cannot be written: {error.strerror or error}") from None
    else:
        write_atomically(path.resolve(), text)  # resolved: a link stays a link


def _say(label: str, lines: Sequence[str]) -> None:
    """One message on standard error; control characters of untrusted text are shown, not sent."""
    shown = ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
             for text in lines for line in text.splitlines() or [""]]
    if len(shown) == 1:
        click.echo(f"{label}: {shown[0]}", err=True)
    elif shown:
        click.echo("\n".join([f"{label}:", *(f"  {line}" for line in shown)]), err=True)


def _fail(error: MeshwrightError) -> int:
    if isinstance(error, InvalidInput):
        _say("error", error.problems)
    elif isinstance(error, InternalError):
        _say("internal error (please report it with the command)", [str(error)])
    elif isinstance(error, Interrupted):
        _say("interrupted", [str(error) or "there is no layout yet"])
    else:
        _say("error" if not isinstance(error, Infeasible) else "does not fit", [str(error)])
        diagnosis: Any = getattr(error, "diagnosis", None)
        if diagnosis is not None:
            for line in diagnosis.lines():
                click.echo(click.wrap_text(line, 100, "  ", "      "), err=True)
    return error.exit_status


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; the exit status."""
    try:
        status = commands.main(args=arguments, prog_name="plan", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _fail(Interrupted("there is no layout yet"))
    except MeshwrightError as error:
        return _fail(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        _say("error", [f"standard output cannot be written: {error.strerror}"])
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  (the flush at exit would fail again)
        return InvalidInput.exit_status
