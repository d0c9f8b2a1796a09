"""Plain tables, pairs of words, and sizes for people. Cells are shown as they are; escape what comes from files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tinyvllm_cli.render.console import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table


def table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """An empty table whose long cells are folded, but those of the columns `whole`; `right`: columns of numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    result = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        result.add_column(column, justify=justify, overflow="fold", no_wrap=column in whole)
    return result


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """What and how, line by line."""
    from rich.table import Table

    result = Table.grid(padding=(0, 2))
    for key, value in rows:
        result.add_row(one_line(key), one_line(value))
    return result


def size(nbytes: int) -> str:
    """Bytes in the unit that people read easily: "512 B", "1.50 MiB"."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes:,} B" if unit == "B" else f"{value:,.2f} {unit}"
