"""The contest as tables: one of a scenario's rows, one of all scenarios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.hand_tuned.score import NEAR, geometric_mean, speed_ups, spread

__all__ = ["markdown", "print_scenario", "print_summary", "summary_lines", "summary_rows"]

Result = dict[str, Any]


def print_scenario(result: Result, console: Console) -> None:
    """Every entrant of one scenario, fastest first; what did not run last, with the reason."""
    batch = result["scenario"]["global_batch"]
    table = Table(title=f"{result['name']}: {result['why']}", title_style="", title_justify="left")
    for heading in ("layout", "degrees", "samples/s", "spread", "predicted", "step s"):
        table.add_column(heading, overflow="fold", justify="right" if heading in
                         ("samples/s", "spread", "predicted", "step s") else "left")
    ran = [row for row in result["rows"] if row["measured_s"] is not None]
    for row in sorted(ran, key=lambda row: row["measured_s"]):
        table.add_row(", ".join(row["names"]), row["degrees"], f"{batch / row['measured_s']:.2f}",
                      f"{spread(row['turns_s'] + row['final_s']):.1%}",
                      f"{batch / row['predicted_s']:.2f}", f"{row['measured_s']:.3f}")
    for row in result["rows"]:
        if row["measured_s"] is None:
            table.add_row(", ".join(row["names"]), f"failed: {row['problem'][:120]}", "-", "-",
                          f"{batch / row['predicted_s']:.2f}", "-")
    for name, problem in result["refused"]:
        table.add_row(name, f"none: {problem[:120]}", "-", "-", "-", "-")
    console.print(table)
    console.print(verdict(result))


def verdict(result: Result) -> str:
    """How the plan came off, in a line."""
    score = result["score"]
    if score["regret"] is None:
        return f"the plan did not run: {result['rows'][0]['problem']}"
    if score["regret"] == 0:
        return f"the plan is the fastest of {score['num_ran']}"
    return (f"the plan is {score['regret']:.1%} slower than {score['best']} (turns differ by "
            f"{score['noise']:.1%}), rank {score['rank']} of {score['num_ran']}")


def summary_rows(results: Sequence[Result]) -> list[list[str]]:
    """A row for each scenario: name, the plan, its samples/s, rank, regret, noise, speed-ups."""
    rows = []
    for result in results:
        plan, score = result["rows"][0], result["score"]
        measured = plan["measured_s"]
        batch = result["scenario"]["global_batch"]
        regret = "failed" if score["regret"] is None else f"{score['regret']:.1%}"
        error = "-" if measured is None else f"{plan['predicted_s'] / measured - 1:+.0%}"
        ups = [speed_ups([result], name) for name in ("FSDP", "Megatron's rule")]
        rows.append([
            result["name"], plan["degrees"],
            "-" if measured is None else f"{batch / measured:.2f}", error,
            f"{score['rank'] or '-'} of {score['num_ran']}", regret, f"{score['noise']:.1%}",
            *(f"{found[0]:.2f}" if found else "-" for found in ups)])
    return rows


HEADINGS = ("scenario", "the plan", "samples/s", "predicted step", "rank", "regret", "noise",
            "x FSDP", "x Megatron")


def summary_lines(results: Sequence[Result]) -> list[str]:
    """What all scenarios together say."""
    near = [r for r in results if r["score"]["regret"] is not None
            and r["score"]["regret"] <= NEAR]
    worst = max((r["score"]["regret"] for r in results if r["score"]["regret"] is not None),
                default=0.0)
    failed = sum(r["score"]["regret"] is None for r in results)
    lines = [f"the plan is the fastest or within {NEAR:.0%} of it in {len(near)} of "
             f"{len(results)} scenarios; its largest loss is {worst:.1%}"
             + (f"; in {failed} it did not run" if failed else "")]
    for name in ("FSDP", "Megatron's rule"):
        found = speed_ups(results, name)
        mean = geometric_mean(found)
        if mean is not None:
            lines.append(f"against {name}: {mean:.2f} times as fast (geometric mean of "
                         f"{len(found)} scenarios in which both ran)")
    return lines


def print_summary(results: Sequence[Result], console: Console) -> None:
    """The table of all scenarios, and what it comes to."""
    table = Table(title="The plan against hand-tuned and random layouts, measured", title_style="")
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold", justify="left" if heading in HEADINGS[:2]
                         else "right")
    for row in summary_rows(results):
        table.add_row(*row)
    console.print(table)
    for line in summary_lines(results):
        console.print(line)


def markdown(results: Sequence[Result]) -> str:
    """The same table for a README."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---|---|" + "---:|" * (len(HEADINGS) - 2)]
    lines += ["| " + " | ".join(row) + " |" for row in summary_rows(results)]
    return "\n".join([*lines, "", *summary_lines(results)]) + "\n"
