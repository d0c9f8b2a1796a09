"""How `bench` looks: a line on stderr as each row is done, then tables, JSON, CSV or Markdown on stdout."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tinyvllm_cli.errors import ExitCode, UserError
from tinyvllm_cli.render.bench_tables import facts_of, label, machine, peer_words, sections, summary
from tinyvllm_cli.render.console import Console, one_line
from tinyvllm_cli.render.roofline import Point, svg_plot, text_plot

if TYPE_CHECKING:
    from tinyvllm_cli.bench.kernels import KernelResult
    from tinyvllm_cli.bench.result import Result
    from tinyvllm_cli.commands.bench import BenchResult

Format = Literal["table", "json", "csv", "markdown"]


class BenchView:
    """The sink of `commands.bench`: progress on stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.note(text)

    def warn(self, text: str) -> None:
        self._console.warn(text)

    def loading(self, text: str) -> None:
        self._console.status(text)

    def row(self, result: Result) -> None:
        if result.error is not None:
            self._console.warn(f"{label(result)}: {result.error}")
        else:
            self._console.note(f"{label(result)}: {summary(result)}")

    def kernel(self, result: KernelResult) -> None:
        share = "" if result.share_of_ceiling is None else f", {result.share_of_ceiling:.0%} of the ceiling"
        what = f" {result.what}" if result.what else ""
        self._console.note(f"{result.phase} x {result.tokens}, {result.op}{what}: {result.us:,.2f} us{share}")

    def peer(self, result: Result) -> None:
        peer = result.peers[-1]
        if "error" in peer:
            self._console.warn(f"{peer['name']}, {label(result)}: {peer['error']}")
        else:
            self._console.note(f"{peer['name']}, {label(result)}: {peer_words(peer)}")


def pick_form(**asked: bool) -> Format:
    """The form whose option is given, tables without one."""
    chosen = [name for name, given in asked.items() if given]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} are given", fix="Use one of them.", exit_code=ExitCode.USAGE)
    forms: dict[str, Format] = {"json": "json", "csv": "csv", "markdown": "markdown"}
    return forms[chosen[0]] if chosen else "table"


def show(result: BenchResult, console: Console, form: Format) -> None:
    """Writes the result to stdout in one of the forms."""
    if form == "json":
        console.json(result.to_json())
    elif form == "csv":
        console.write(_csv(result))
    elif form == "markdown":
        console.write(_markdown(result))
    else:
        _show_tables(result, console)


def check_plot(path: Path) -> None:
    """UserError unless the plot can be drawn; asked before anything is measured."""
    if path.suffix.lower() != ".svg":
        raise UserError(
            f"{path.suffix or 'a file without suffix'} cannot be drawn: only SVG is written here",
            where=f"--plot {path}",
            fix="Give a name that ends in .svg; browsers and `rsvg-convert` make a PNG of it.",
            exit_code=ExitCode.USAGE,
        )
    if not path.resolve().parent.is_dir():
        raise UserError("its folder does not exist", where=f"--plot {path}", fix="Make the folder first.")
    if path.is_dir() or not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise UserError("it cannot be written", where=f"--plot {path}", fix="Choose another place.")


def write_plot(result: BenchResult, path: Path) -> None:
    """Writes the roofline as SVG. UserError when there is nothing to draw, or no place for it."""
    points, ceiling = _points(result), result.environment["ceiling"]
    if not points or not ceiling:
        raise UserError("nothing to draw: no row has a result and a ceiling", where=f"--plot {path}")
    title = f"{result.environment['model']} on {machine(result.environment)}, {result.environment['dtype']}"
    document = svg_plot(points, ceiling["read_bytes_per_second"], ceiling["matmul_flops_per_second"], title)
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the plot cannot be written: {error.strerror}", where=f"--plot {path}") from error


def _points(result: BenchResult) -> list[Point]:
    tests = [(label(row), row.flops, row.bytes, row.tflop_per_second) for row in result.results]
    ops = [(_kernel_label(k), k.flops, k.bytes, k.tflop_per_second) for k in result.kernels]
    return [Point(name, flops / nbytes, 1e12 * rate) for name, flops, nbytes, rate in tests + ops if flops and rate]


def _kernel_label(kernel: KernelResult) -> str:
    return f"{kernel.op} {kernel.what}".rstrip() + f", {kernel.tokens} tokens"


def _show_tables(result: BenchResult, console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rich = console.rich()
    facts = Table.grid(padding=(0, 2))
    for key, value in facts_of(result.environment):
        facts.add_row(one_line(key), one_line(value))
    rich.print(facts)
    for heading, columns, rows in sections(result):
        console.heading(heading, blank_before=True)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for i, column in enumerate(columns):
            numeric = bool(i) and all(not row[i] or row[i][0] in "0123456789+-±" or row[i] == "failed" for row in rows)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(one_line, row))
        rich.print(table)
    shares = [row.share_of_ceiling for row in result.results] + [op.share_of_ceiling for op in result.kernels]
    if any(share and share > 1 for share in shares):
        console.note("More than 100% of the ceiling: what is read again and again stays in the caches.")
    points, ceiling = _points(result), result.environment["ceiling"]
    if points and ceiling:
        console.heading("Roofline", blank_before=True)
        plot = text_plot(points, ceiling["read_bytes_per_second"], ceiling["matmul_flops_per_second"])
        console.write("\n".join(plot) + "\n")


def _csv(result: BenchResult) -> str:
    """One line a result (or op), with the fields of the JSON; samples and other lists as JSON in their cell."""
    rows = [row.to_json() for row in (result.kernels or result.results)]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: json.dumps(v) if isinstance(v, (list, dict)) else v for key, v in row.items()})
    return out.getvalue()


def _markdown(result: BenchResult) -> str:
    lines = [f"- {key}: {one_line(value)}" for key, value in facts_of(result.environment)]
    for heading, columns, rows in sections(result):
        lines += ["", f"### {heading}", "", _markdown_row(columns), "|" + " --- |" * len(columns)]
        lines += [_markdown_row(row) for row in rows]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(one_line(cell).replace("|", "\\|") for cell in cells) + " |"
