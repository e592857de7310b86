"""``feedapi discover``: show what a feed says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from feedapi_client.cli.feed_options import (
    ONE_SHOT,
    Connection,
    GiveUpAfter,
    Json,
    Lineage,
    Url,
    V1Partitions,
    checked_url,
    edges,
)
from feedapi_client.cli.reporting import run_async

if TYPE_CHECKING:
    from collections.abc import Mapping

    from feedapi_client.model import FeedInfo

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Discover:
    """Options of ``feedapi discover``."""

    url: Url
    json: Json = False
    v1_partitions: V1Partitions = None
    lineage: Lineage = None
    give_up_after: GiveUpAfter = ONE_SHOT
    connection: Connection


def discover(options: Discover) -> None:
    """Show a feed's dialect, flags and partitions, and the lineage of the partitions.

    Says where the feed seems to leave out which partition starts after which. Try --lineage then:
    the tree is drawn as a consumer with the same option sees it.
    """
    from feedapi_client.errors import LineageError
    from feedapi_client.lineage.graph import with_edges

    checked_url(options.url)
    added = edges(options.lineage)
    feed, info = run_async(_discover, options)
    named = added.keys() | {parent for parent in added.values() if parent is not None}
    for partition in sorted(named - info.partitions.keys()):
        # For a consumer the edge would sleep until the partition is listed. Here it is nothing.
        raise LineageError(
            "--lineage names it, and it is not listed", feed=feed, partition=partition
        )
    info = with_edges(info, added, feed=feed)
    if options.json:
        from feedapi_client.cli.escape import print_json

        print_json(as_json(feed, info))
    else:
        _print_info(feed, info, added)


async def _discover(options: Discover) -> tuple[str, FeedInfo]:
    """Return the name of the feed in messages, and the discovery. Raises `FeedError`."""
    from feedapi_client import FeedClient, RetryPolicy

    retry = RetryPolicy(give_up_after=options.give_up_after)
    async with (
        options.connection.client() as http,
        FeedClient(
            options.url, http=http, v1_partitions=options.v1_partitions, retry=retry
        ) as client,
    ):
        return client.feed, await client.discover()


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
    from feedapi_client.cli.escape import shown
    from feedapi_client.cli.terminal import console, plain_line

    flags = [f"dialect {info.dialect}"]
    if info.exactly_once:
        flags.append("exactly once")
    if info.stream:
        flags.append("stream")
    if info.filters:
        flags.append(f"filters {shown(', '.join(info.filters))}")
    console().print(plain_line(feed, "bold"))
    console().print(plain_line(" · ".join(flags)))
    _print_partitions(info)
    if any(p.starts_after is not None or p.cursor_from for p in info.partitions.values()):
        _print_lineage(info, added)
    _print_suspected_edges(info)


def _print_partitions(info: FeedInfo) -> None:
    from feedapi_client.cli.terminal import print_table

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
    from feedapi_client.cli.terminal import console, plain_line
    from feedapi_client.lineage.graph import suspected_missing_edges

    suspected = suspected_missing_edges(None, info.partitions)
    if suspected is None:
        return
    console().print(plain_line(f"suspected: {suspected}", "yellow"))
    parent = suspected.parents[0]
    options = " ".join(f"--lineage {child}:{parent}" for child in suspected.children[:_SHOWN])
    console().print(plain_line(f"on the command line: {options}", "yellow"))


def _print_lineage(info: FeedInfo, added: Mapping[int, int | None]) -> None:
    from rich.text import Text

    from feedapi_client.cli.lineage_tree import lineage_tree
    from feedapi_client.cli.terminal import console

    def label(id: int) -> Text:
        if info.partitions[id].closed:
            return Text(f"{id}  closed", style="dim")
        return Text(f"{id}  open", style="green")

    edges = [child for child, parent in added.items() if parent is not None]
    console().print(lineage_tree(info.partitions, Text("lineage", style="bold"), label, edges))
