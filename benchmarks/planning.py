"""How long the planner takes to prove its answer: one row per question.

    python -m benchmarks.planning [-o results.json] [--only NAME] [--repeats N]

Each question is planned in a process of its own, from command to answer (interpreter start,
catalogue, search, proof), so that seconds and peak memory are what a user sees; the modules' byte
code is compiled before, as that of an installed package is. Printed: the size
of the space, candidates priced and solved, wall and processor seconds (medians of the repeats),
peak memory, status, gap.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from profiler.documents import write_atomically


@dataclass(frozen=True, slots=True)
class Question:
    """One planning request; `goal_s` is the wall time aimed at on two cores."""

    name: str
    model: str
    topology: str
    global_batch: int
    seq_len: int
    goal_s: float
    options: tuple[str, ...] = ()
    note: str = ""


# 36 GB devices: an A100's figures with its memory overridden, as in the published searches over
# Llama 7B.
SMALL_DEVICES = {
    "preset": "dgx-a100-40g", "nodes": 1, "memory_bytes": 36 * 10**9,
    "name": "8 devices of 36 GB"}

QUESTIONS = (
    Question("llama3-8b-8", "llama3-8b", "dgx-h100", 256, 8192, 1.0),
    Question("llama3-70b-64", "llama3-70b", "dgx-h100:8", 512, 8192, 5.0),
    Question("gpt3-175b-64", "gpt3-175b", "dgx-a100-80g:8", 64, 2048, 5.0,
             note="an exhaustive peer needs 1,088 core-seconds for a smaller space"),
    Question("gpt3-175b-4096", "gpt3-175b", "dgx-a100-80g:512", 1536, 2048, 5.0),
    Question("megatron-1t-3072", "megatron-1t", "dgx-a100-80g:384", 3072, 2048, 5.0),
    Question("llama3-405b-16384", "llama3.1-405b", "dgx-h100:2048", 2048, 8192, 5.0),
    Question("llama2-7b-8x36gb", "llama2-7b", "small", 64, 2048, 1.0,
             note="every micro-batch count; another planner needs 84 s"),
    Question("chain-96-512", "gpt3-175b", "dgx-a100-80g:64", 512, 2048, 5.0,
             note="96 blocks in a chain; another planner needs 11 s"),
    Question("chain-96-2048", "gpt3-175b", "dgx-a100-80g:256", 2048, 2048, 5.0,
             note="96 blocks in a chain; the same planner never ends"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one question took."""

    name: str
    seconds: float
    seconds_of_repeats: list[float]
    cpu_seconds: float
    peak_memory_mib: float
    space: int
    candidates: int
    filled: int
    solved: int
    status: str
    gap: float
    step_s: float
    goal_s: float


def ask(question: Question, repeats: int, folder: Path) -> Answer:
    """Plan in a fresh process, `repeats` times."""
    topology = question.topology
    if topology == "small":
        file = folder / "small.json"
        file.write_text(json.dumps(SMALL_DEVICES))
        topology = str(file)
    command = [sys.executable, "-m", "planner", question.model, "--topology", topology,
               "--global-batch", str(question.global_batch), "--seq-len", str(question.seq_len),
               "--json", *question.options]
    seconds, cpu, peaks, output = [], [], [], b""
    environment = {key: value for key, value in os.environ.items()
                   if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    if not (folder / "bytecode").exists():
        subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=False)
    for _ in range(repeats):
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds.append(time.perf_counter() - start)
        cpu.append(usage.ru_utime + usage.ru_stime)
        peaks.append(_mebibytes(usage))
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(f"{' '.join(command)}: exit status "
                             f"{os.waitstatus_to_exitcode(status)}")
    layout = json.loads(output)
    proof = layout["proof"]
    return Answer(
        name=question.name, seconds=statistics.median(seconds), seconds_of_repeats=seconds,
        cpu_seconds=statistics.median(cpu),
        peak_memory_mib=max(peaks), space=proof["space_size"], candidates=proof["candidates"],
        filled=proof["bounded"], solved=proof["solved"], status=proof["status"],
        gap=proof["gap"], step_s=layout["prediction"]["step_s"], goal_s=question.goal_s)


def _mebibytes(usage: resource.struct_rusage) -> float:
    kibibytes = usage.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return kibibytes / 1024


def table(answers: list[Answer]) -> Table:
    """The answers for a person."""
    result = Table(title=f"planning, {os.cpu_count()} cores, wall seconds from command to answer")
    for heading in ("question", "space", "priced", "bounded", "solved", "seconds", "CPU s",
                    "goal", "peak MiB", "status", "gap", "step s"):
        result.add_column(heading, justify="left" if heading in ("question", "status") else "right")
    for a in answers:
        result.add_row(a.name, f"{a.space:,}", f"{a.candidates:,}", str(a.filled), str(a.solved),
                       f"{a.seconds:.2f}", f"{a.cpu_seconds:.2f}", f"{a.goal_s:g}",
                       f"{a.peak_memory_mib:.0f}", a.status, f"{a.gap:.1e}" if a.gap else "0",
                       f"{a.step_s:.3f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="write the answers as JSON")
    parser.add_argument("--only", action="append", help="this question; may be repeated")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    names = [question.name for question in QUESTIONS]
    unknown = set(arguments.only or ()) - set(names)
    if unknown or arguments.repeats < 1:
        parser.error(f"unknown questions {sorted(unknown)}; known: {', '.join(names)}"
                     if unknown else "--repeats must be at least 1")
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for question in QUESTIONS:
            if not arguments.only or question.name in arguments.only:
                answers.append(ask(question, arguments.repeats, Path(folder)))
                print(f"{question.name}: {answers[-1].seconds:.2f} s", file=sys.stderr)
    Console(width=120).print(table(answers))
    if arguments.output:
        write_atomically(arguments.output, json.dumps(
            {"cores": os.cpu_count(), "answers": [asdict(a) for a in answers]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
