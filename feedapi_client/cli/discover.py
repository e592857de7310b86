"""``feedapi discover``: what a feed says about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from feedapi_client.cli.common.options import (
    AuthEnv,
    GiveUpAfter,
    HeaderEnv,
    Json,
    Url,
    V1Partitions,
)
from feedapi_client.cli.common.run_async import run_async

if TYPE_CHECKING:
    from feedapi_client.model import FeedInfo


def discover(
    url: Url,
    json: Json = False,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    v1_partitions: V1Partitions = None,
    give_up_after: GiveUpAfter = 5.0,
) -> None:
    """Show a feed's dialect, flags and partitions, and how the partitions descend from each other."""
    from feedapi_client.cli.common.http_client import headers_from

    feed, info = run_async(
        _ask, url, headers_from(auth_env, header_env), v1_partitions, give_up_after
    )
    if json:
        import orjson

        print(orjson.dumps(as_json(feed, info), option=orjson.OPT_INDENT_2).decode())
    else:
        _draw(feed, info)


async def _ask(
    url: str, headers: dict[str, str], v1_partitions: int | None, give_up_after: float
) -> tuple[str, FeedInfo]:
    from feedapi_client import FeedClient, Limits, RetryPolicy
    from feedapi_client.cli.common.http_client import http_client

    retry = RetryPolicy(give_up_after=give_up_after)
    async with (
        http_client(headers, Limits()) as http,
        FeedClient(url, http=http, v1_partitions=v1_partitions, retry=retry) as client,
    ):
        return client.feed, await client.discover()


def as_json(feed: str, info: FeedInfo) -> dict[str, Any]:
    """The discovery in one form for all dialects."""
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
    }


def _draw(feed: str, info: FeedInfo) -> None:
    from rich.text import Text

    from feedapi_client.cli.common.tables import console, lineage_tree, plain, print_table

    out = console()
    out.print(plain(feed, "bold"))
    flags = [
        f"dialect {info.dialect}",
        *(["exactly once"] if info.exactly_once else []),
        *(["stream"] if info.stream else []),
    ]
    filters = [f"filters {', '.join(info.filters)}"] if info.filters else []
    out.print(plain(" · ".join([*flags, *filters])))
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

    def label(id: int) -> Text:
        return (
            Text(f"{id}  closed", style="dim")
            if info.partitions[id].closed
            else Text(f"{id}  open", style="green")
        )

    if any(p.starts_after is not None or p.cursor_from for p in info.partitions.values()):
        out.print(lineage_tree(info.partitions, Text("lineage", style="bold"), label))
