"""``feedapi discover``: show what a feed says about itself."""

from __future__ import annotations

from typing import Any

import feedapi_client
from feedapi_client.cli import options
from feedapi_client.cli.command import command
from feedapi_client.cli.options import AskedWithLineage
from feedapi_client.cli.terminal import Cell, console, print_json, print_line, print_table, shown
from feedapi_client.errors import LineageError
from feedapi_client.lineage.graph import suspected_missing_edges, with_edges
from feedapi_client.model import FeedInfo, Partition

_COLUMNS = ("partition", "state", "starts after", "cursor from", "last cursor")


@command(
    "discover https://service/myfeed",
    "discover https://service/myfeed --auth-env TOKEN --json",
    "discover https://service/myfeed --lineage 1:0 --lineage 2:0",
)
async def discover(*, asked: AskedWithLineage, json: bool = options.as_json()) -> None:
    """Show a feed's dialect, flags and partitions, and the lineage of the partitions.

    Says where the feed seems to leave out which partition starts after which. Try --lineage then:
    the tree is drawn as a consumer with the same option sees it.
    """
    added, count = asked.lineage or {}, asked.v1_partitions
    retry = options.one_shot(asked.give_up_after)
    async with (
        asked.connection.client() as http,
        feedapi_client.FeedClient(asked.url, http=http, v1_partitions=count, retry=retry) as client,
    ):
        feed, info = client.feed, await client.discover()
    named = {id for edge in added.items() for id in edge if id is not None}
    for id in sorted(named - info.partitions.keys()):
        # For a consumer the edge would sleep until the partition is listed. Here it is nothing.
        raise LineageError("--lineage names it, and it is not listed", feed=feed, partition=id)
    info = with_edges(info, added, feed=feed)
    suspected = suspected_missing_edges(None, info.partitions)
    if json:
        print_json(
            _as_json(feed, info) | {"suspected_missing_edges": suspected and suspected._asdict()}
        )
        return
    print_line(feed, "bold")
    flags = [f"dialect {info.dialect}", *(["exactly once"] if info.exactly_once else [])]
    flags += ["stream"] if info.stream else []
    flags += [f"filters {shown(', '.join(info.filters))}"] if info.filters else []
    print_line(" · ".join(flags))
    rows: list[list[Cell]] = []
    for each in info.partitions.values():
        parents = (each.starts_after, ", ".join(map(str, each.cursor_from)), each.last_cursor)
        texts = ("" if cell is None else str(cell) for cell in parents)
        rows.append([str(each.id), _state(each), *texts])
    print_table(_COLUMNS, rows)
    if any(_parent(each) is not None for each in info.partitions.values()):
        _print_lineage(info, {child for child, parent in added.items() if parent is not None})
    if suspected is not None:
        edges = (f"--lineage {child}:{suspected.parents[0]}" for child in suspected.children)
        print_line(f"suspected: {suspected}", "yellow")
        print_line(f"on the command line: {' '.join([*edges][:8])}", "yellow")


def _as_json(feed: str, info: FeedInfo) -> dict[str, Any]:
    """Return the discovery as JSON, in one form for all dialects."""
    names = ("dialect", "token", "exactly_once", "stream")
    columns = ("id", "closed", "last_cursor", "starts_after", "cursor_from")
    rows = [{name: getattr(each, name) for name in columns} for each in info.partitions.values()]
    about = {name: getattr(info, name) for name in names}
    return {"feed": feed, **about, "filters": list(info.filters), "partitions": rows}


def _state(partition: Partition) -> tuple[str, str]:
    return ("closed", "dim") if partition.closed else ("open", "green")


def _parent(partition: Partition) -> int | None:
    """What it starts after, or else the nearest partition that it takes its cursor from."""
    if partition.starts_after is not None:
        return partition.starts_after
    return next(iter(partition.cursor_from), None)


def _print_lineage(info: FeedInfo, added: set[int]) -> None:
    """Draw each partition below its parent, one that is no longer listed, too."""
    from rich.text import Text
    from rich.tree import Tree

    children: dict[int | None, list[int]] = {}
    for partition in info.partitions.values():
        children.setdefault(_parent(partition), []).append(partition.id)
    unlisted = {parent for parent in children if parent is not None} - info.partitions.keys()
    tree = Tree(Text("lineage", "bold"), guide_style="dim")
    # A stack instead of recursion: a chain of splits may be longer than Python's recursion limit.
    pending = [(tree, id) for id in sorted(unlisted.union(children.get(None, ())), reverse=True)]
    while pending:
        above, id = pending.pop()
        edge, state = ("", ""), ("no longer listed", "dim")
        if (listed := info.partitions.get(id)) is not None:
            state = _state(listed)
            if listed.starts_after is not None:
                edge = (f"after{' (--lineage)' if id in added else ''} ▸ ", "blue")
            elif listed.cursor_from:
                edge = ("cursor ▸ ", "magenta")
        branch = above.add(Text.assemble(edge, (f"{id}  {state[0]}", state[1])))
        pending += [(branch, child) for child in sorted(children.get(id, ()), reverse=True)]
    console().print(tree)
