"""``feedapi discover``: show what a feed says about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from feedapi_client.cli.common.options import (
    AuthEnv,
    CaFile,
    GiveUpAfter,
    HeaderEnv,
    Json,
    Lineage,
    Url,
    V1Partitions,
    edges,
)
from feedapi_client.cli.common.run_async import run_async

if TYPE_CHECKING:
    from collections.abc import Mapping

    from feedapi_client.model import FeedInfo

_SHOWN = 8


def discover(
    url: Url,
    json: Json = False,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    ca_file: CaFile = None,
    v1_partitions: V1Partitions = None,
    lineage: Lineage = None,
    give_up_after: GiveUpAfter = 5.0,
) -> None:
    """Show a feed's dialect, flags and partitions, and the lineage of the partitions.

    Says where the feed seems to leave out which partition starts after which. Try --lineage then:
    the tree is drawn as a consumer with the same option sees it.
    """
    from feedapi_client.cli.common.feed_url import checked_url
    from feedapi_client.cli.common.http_client import headers_from_environment
    from feedapi_client.lineage.missing_edges import with_edges

    headers = headers_from_environment(auth_env, header_env)
    checked_url(url)
    added = edges(lineage)
    feed, info = run_async(_discover, url, (headers, ca_file), v1_partitions, give_up_after)
    info = with_edges(info, added, known=(), feed=feed)
    if json:
        from feedapi_client.cli.common.json_output import print_json

        print_json(as_json(feed, info))
    else:
        _print_info(feed, info, added)


async def _discover(
    url: str,
    sent: tuple[dict[str, str], str | None],
    v1_partitions: int | None,
    give_up_after: float,
) -> tuple[str, FeedInfo]:
    """Return the name of the feed in messages, and the discovery. Raises `FeedError`."""
    from feedapi_client import FeedClient, Limits, RetryPolicy
    from feedapi_client.cli.common.http_client import http_client

    retry = RetryPolicy(give_up_after=give_up_after)
    async with (
        http_client(sent[0], Limits(), sent[1]) as http,
        FeedClient(url, http=http, v1_partitions=v1_partitions, retry=retry) as client,
    ):
        return client.feed, await client.discover()


def as_json(feed: str, info: FeedInfo) -> dict[str, Any]:
    """Return the discovery as JSON, in one form for all dialects."""
    from feedapi_client.lineage.missing_edges import suspected_missing_edges

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


def _print_info(feed: str, info: FeedInfo, added: Mapping[int, int]) -> None:
    from feedapi_client.cli.common.console import console, plain_line
    from feedapi_client.cli.common.escape import shown

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
    from feedapi_client.cli.common.tables import print_table

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
    from feedapi_client.cli.common.console import console, plain_line
    from feedapi_client.lineage.missing_edges import suspected_missing_edges

    suspected = suspected_missing_edges(None, info.partitions)
    if suspected is None:
        return
    console().print(plain_line(f"suspected: {suspected}", "yellow"))
    parent = suspected.parents[0]
    options = " ".join(f"--lineage {child}:{parent}" for child in suspected.children[:_SHOWN])
    console().print(plain_line(f"on the command line: {options}", "yellow"))


def _print_lineage(info: FeedInfo, added: Mapping[int, int]) -> None:
    from rich.text import Text

    from feedapi_client.cli.common.console import console
    from feedapi_client.cli.common.lineage_tree import lineage_tree

    def label(id: int) -> Text:
        if info.partitions[id].closed:
            return Text(f"{id}  closed", style="dim")
        return Text(f"{id}  open", style="green")

    console().print(lineage_tree(info.partitions, Text("lineage", style="bold"), label, added))
