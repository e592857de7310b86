"""``feedapi discover``: show what a feed says about itself."""

from __future__ import annotations

from typing import Any

import feedapi_client
from feedapi_client.cli import options
from feedapi_client.cli.command import command
from feedapi_client.cli.terminal import print_json, print_table, report, shown

_COLUMNS = ("partition", "state", "starts after", "cursor from", "last cursor")
_FIELDS = ("id", "closed", "last_cursor", "starts_after", "cursor_from")


@command(
    "discover https://service/myfeed",
    "discover https://service/myfeed --auth-env TOKEN --json",
)
async def discover(
    *,
    asked: options.AskedFeed,
    give_up_after: float = options.give_up_after(default=options.ONE_SHOT),
    json: bool = options.as_json(),
) -> None:
    """Show a feed's dialect, flags and partitions, and what each of these follows."""
    retry = options.one_shot(give_up_after)
    async with (
        asked.connection.client() as http,
        feedapi_client.FeedClient(
            asked.url, http=http, v1_partitions=asked.v1_partitions, retry=retry
        ) as client,
    ):
        feed, info = client.feed, await client.discover()
    partitions = [{n: getattr(each, n) for n in _FIELDS} for each in info.partitions.values()]
    if json:
        names = ("dialect", "token", "exactly_once", "stream")
        about: dict[str, Any] = {name: getattr(info, name) for name in names}
        about |= {"filters": list(info.filters), "partitions": partitions}
        print_json({"feed": feed} | about)
        return
    report(feed)
    flags = [f"dialect {info.dialect}", *(["exactly once"] if info.exactly_once else [])]
    flags += ["stream"] if info.stream else []
    flags += [f"filters {shown(', '.join(info.filters))}"] if info.filters else []
    report(" · ".join(flags))
    rows = []
    for each in info.partitions.values():
        state = "closed" if each.closed else "open"
        parents = (each.starts_after, ", ".join(map(str, each.cursor_from)), each.last_cursor)
        rows.append([str(each.id), state, *("" if text is None else str(text) for text in parents)])
    print_table(_COLUMNS, rows)
