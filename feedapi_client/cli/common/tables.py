"""What rich draws for several commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from feedapi_client.cli.common.escape import one_line
from feedapi_client.model import Partition

_WIDTH_OF_A_FILE = 200
_STYLES = {
    "reading": "green",
    "caught up": "cyan",
    "drained": "dim",
    "superseded": "dim",
    "retrying": "yellow",
    "parked": "red",
    "vanished": "red",
}

_LARGE = 1000

Label = Callable[[int], Text]
Cell = str | tuple[str, str]


def console(*, stderr: bool = False) -> Console:
    """A console that does not wrap tables when the output goes to a file."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr, highlight=False, width=None if stream.isatty() else _WIDTH_OF_A_FILE
    )


def plain(text: object, style: str = "") -> Text:
    """Text from elsewhere: neither markup nor control characters count."""
    return Text(one_line(str(text)), style=style)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """A table: each cell is a text, or a text and its style. Large ones are lines of columns, which is a thousand times quicker."""
    if len(rows) > _LARGE:
        _print_columns(
            columns, [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in rows]
        )
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(plain(cell) if isinstance(cell, str) else plain(*cell) for cell in row))
    console().print(table)


def _print_columns(columns: Sequence[str], rows: list[list[str]]) -> None:
    lines = [list(columns), *([one_line(text) for text in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )


def state_style(state: str) -> str:
    """The colour of a partition's state."""
    return _STYLES.get(state, "yellow" if state.startswith("waiting") else "")


def lineage_tree(partitions: Mapping[int, Partition], title: Text, label: Label) -> Tree:
    """The partitions, each under the one that it starts after or takes its cursor from; ancestors that are gone are drawn too."""
    children: dict[int | None, list[int]] = {}
    for partition in partitions.values():
        children.setdefault(_parent(partition), []).append(partition.id)
    tree = Tree(title, guide_style="dim")
    gone = sorted(parent for parent in children if parent is not None and parent not in partitions)
    pending: list[tuple[Tree, int]] = [
        (tree, root) for root in sorted({*children.get(None, ()), *gone}, reverse=True)
    ]
    while pending:
        above, id = pending.pop()
        text = _edge(partitions.get(id)) + (
            label(id) if id in partitions else Text(f"{id}  no longer listed", style="dim")
        )
        branch = above.add(text)
        pending += [(branch, child) for child in sorted(children.get(id, ()), reverse=True)]
    return tree


def _parent(partition: Partition) -> int | None:
    return (
        partition.starts_after
        if partition.starts_after is not None
        else next(iter(partition.cursor_from), None)
    )


def _edge(partition: Partition | None) -> Text:
    if partition is None or _parent(partition) is None:
        return Text()
    if partition.starts_after is not None:
        return Text("after ▸ ", style="blue")
    return Text("cursor ▸ ", style="magenta")
