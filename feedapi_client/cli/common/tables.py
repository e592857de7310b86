"""Print tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from feedapi_client.cli.common.console import console, plain
from feedapi_client.cli.common.escape import shown

# Above this, plain columns: printing them is a thousand times faster than drawing with rich.
_MAX_DRAWN_ROWS = 1000

Cell = str | tuple[str, str]
"""A text, or a text and its style."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table. One of more than 1000 rows is printed without lines and styles, for speed."""
    if len(rows) > _MAX_DRAWN_ROWS:
        _print_columns(
            columns, [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in rows]
        )
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(plain(cell) if isinstance(cell, str) else plain(*cell) for cell in row))
    console().print(table)


def _print_columns(columns: Sequence[str], rows: list[list[str]]) -> None:
    lines = [list(columns), *([shown(text) for text in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
