"""``feedapi discover``: show what a feed says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from feedapi_client.cli.command import command, option
from feedapi_client.cli.options import AskedWithLineage
from feedapi_client.cli.terminal import console, print_json, print_line, print_table, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from feedapi_client.model import FeedInfo

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Discover:
    """Options of ``feedapi discover``."""

    asked: AskedWithLineage
    json: bool = option(help="Print JSON.", default=False)


@command(
    "discover https://service/myfeed",
    "discover https://service/myfeed --auth-env TOKEN --json",
    "discover https://service/myfeed --lineage 1:0 --lineage 2:0",
)
async def discover(o: Discover) -> None:
    """Show a feed's dialect, flags and partitions, and the lineage of the partitions.

    Says where the feed seems to leave out which partition starts after which. Try --lineage then:
    the tree is drawn as a consumer with the same option sees it.
    """
    from feedapi_client import FeedClient, RetryPolicy
    from feedapi_client.errors import LineageError
    from feedapi_client.lineage.graph import with_edges

    added, retry = o.asked.edges(), RetryPolicy(give_up_after=o.asked.give_up_after)
    async with o.asked.connection.client() as http:
        count = o.asked.v1_partitions
        async with FeedClient(o.asked.url, http=http, v1_partitions=count, retry=retry) as client:
            feed, info = client.feed, await client.discover()
    named = added.keys() | {parent for parent in added.values() if parent is not None}
    for partition in sorted(named - info.partitions.keys()):
        # For a consumer the edge would sleep until the partition is listed. Here it is nothing.
        raise LineageError(
            "--lineage names it, and it is not listed", feed=feed, partition=partition
        )
    info = with_edges(info, added, feed=feed)
    if o.json:
        print_json(as_json(feed, info))
    else:
        _print_info(feed, info, added)


def as_json(feed: str, info: FeedInfo) -> dict[str, Any]:
    """Return the discovery as JSON, in one form for all dialects."""
    from feedapi_client.lineage.graph import suspected_missing_edges

    suspected = suspected_missing_edges(None, info.partitions)
    return {
        "feed": feed,
        "dialect": info.dialect,
        "token": info.token,
        "exactly_once": info.exactly_once,
        "stream": info.stream,
        "filters": list(info.filters),
        "partitions": [
            {
                "id": p.id,
                "closed": p.closed,
                "last_cursor": p.last_cursor,
                "starts_after": p.starts_after,
                "cursor_from": list(p.cursor_from),
            }
            for p in info.partitions.values()
        ],
        "suspected_missing_edges": None
        if suspected is None
        else {"parents": list(suspected.parents), "children": list(suspected.children)},
    }


def _print_info(feed: str, info: FeedInfo, added: Mapping[int, int | None]) -> None:

    flags = [f"dialect {info.dialect}"]
    if info.exactly_once:
        flags.append("exactly once")
    if info.stream:
        flags.append("stream")
    if info.filters:
        flags.append(f"filters {shown(', '.join(info.filters))}")
    print_line(feed, "bold")
    print_line(" · ".join(flags))
    _print_partitions(info)
    if any(p.starts_after is not None or p.cursor_from for p in info.partitions.values()):
        _print_lineage(info, added)
    _print_suspected_edges(info)


def _print_partitions(info: FeedInfo) -> None:
    print_table(
        ("partition", "state", "starts after", "cursor from", "last cursor"),
        [
            (
                str(p.id),
                ("closed", "dim") if p.closed else ("open", "green"),
                "" if p.starts_after is None else str(p.starts_after),
                ", ".join(map(str, p.cursor_from)),
                p.last_cursor or "",
            )
            for p in info.partitions.values()
        ],
    )


def _print_suspected_edges(info: FeedInfo) -> None:
    from feedapi_client.lineage.graph import suspected_missing_edges

    suspected = suspected_missing_edges(None, info.partitions)
    if suspected is None:
        return
    print_line(f"suspected: {suspected}", "yellow")
    parent = suspected.parents[0]
    options = " ".join(f"--lineage {child}:{parent}" for child in suspected.children[:_SHOWN])
    print_line(f"on the command line: {options}", "yellow")


def _print_lineage(info: FeedInfo, added: Mapping[int, int | None]) -> None:
    from rich.text import Text

    from feedapi_client.cli.lineage_tree import lineage_tree

    def label(id: int) -> Text:
        if info.partitions[id].closed:
            return Text(f"{id}  closed", style="dim")
        return Text(f"{id}  open", style="green")

    edges = [child for child, parent in added.items() if parent is not None]
    console().print(lineage_tree(info.partitions, Text("lineage", style="bold"), label, edges))
