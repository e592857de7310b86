"""``feedapi discover``: what a feed offers, and how its partitions descend from each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import feedapi_client
from feedapi_client.cli import options
from feedapi_client.cli.command import command
from feedapi_client.cli.terminal import MAX_SHOWN, print_json, print_line, print_table, shown
from feedapi_client.errors import LineageError
from feedapi_client.lineage.graph import suspected_missing_edges, with_edges
from feedapi_client.model import FeedInfo, Partition

_COLUMNS = ("partition", "state", "starts after", "cursor from", "last cursor")
_ABOUT = ("dialect", "token", "exactly_once", "stream")
_FIELDS = ("id", "closed", "last_cursor", "starts_after", "cursor_from")


@command(
    "discover https://service/myfeed",
    "discover https://service/myfeed --auth-env TOKEN --json",
    "discover https://service/myfeed --lineage 1:0 --lineage 2:0",
)
async def discover(*, asked: options.AskedWithLineage, json: bool = options.as_json()) -> None:
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
    suspected, partitions = suspected_missing_edges(None, info.partitions), info.partitions.values()
    if json:
        listed = [{name: getattr(each, name) for name in _FIELDS} for each in partitions]
        about: dict[str, Any] = {name: getattr(info, name) for name in _ABOUT}
        about |= {"filters": list(info.filters), "partitions": listed}
        about["suspected_missing_edges"] = suspected and suspected._asdict()
        print_json({"feed": feed} | about)
        return
    print_line(feed)
    flags = [f"dialect {info.dialect}", *(["exactly once"] if info.exactly_once else [])]
    flags += ["stream"] if info.stream else []
    flags += [f"filters {shown(', '.join(info.filters))}"] if info.filters else []
    print_line(" · ".join(flags))
    rows = []
    for each in partitions:
        parents = (each.starts_after, ", ".join(map(str, each.cursor_from)), each.last_cursor)
        texts = ("" if text is None else str(text) for text in parents)
        rows.append([str(each.id), "closed" if each.closed else "open", *texts])
    print_table(_COLUMNS, rows)
    if any(_parent(each) is not None for each in partitions):
        print_line("lineage")
        for indent, text in _lineage(info, {id for id in added if added[id] is not None}):
            print_line(text, indent=indent)
    if suspected is not None:
        edges = (f"--lineage {child}:{suspected.parents[0]}" for child in suspected.children)
        print_line(f"suspected: {suspected}")
        print_line(f"on the command line: {' '.join([*edges][:8])}")


def _parent(partition: Partition) -> int | None:
    if partition.starts_after is not None:
        return partition.starts_after
    return next(iter(partition.cursor_from), None)


def _lineage(info: FeedInfo, added: set[int]) -> Iterator[tuple[str, str]]:
    children: dict[int | None, list[int]] = {}
    for partition in info.partitions.values():
        children.setdefault(_parent(partition), []).append(partition.id)
    unlisted = {parent for parent in children if parent is not None} - info.partitions.keys()
    # A stack instead of recursion: a chain of splits may be longer than Python's recursion limit.
    pending = [("", sorted(unlisted.union(children.get(None, ()))))]
    while pending:
        indent, ids = pending[-1]
        if not ids:
            pending.pop()
            continue
        id = ids.pop(0)
        listed, edge, state = info.partitions.get(id), "", "no longer listed"
        if listed is not None:
            state = "closed" if listed.closed else "open"
            if listed.starts_after is not None:
                edge = f"after{' (--lineage)' if id in added else ''} ▸ "
            elif listed.cursor_from:
                edge = "cursor ▸ "
        yield f"{indent}{'├── ' if ids else '└── '}", f"{edge}{id}  {state}"
        below = f"{indent}{'│   ' if ids else '    '}"[-MAX_SHOWN:]  # of a long chain, the end
        pending.append((below, sorted(children.get(id, ()))))
