"""How far behind stored cursors are, as far as the feed can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import anyio

from feedapi_client.cli.common.http_client import http_client
from feedapi_client.client import FeedClient
from feedapi_client.errors import AuthenticationError, FeedError
from feedapi_client.model import FeedKey, Partition, Position
from feedapi_client.options import FetchOptions, Limits, RetryPolicy

_CONCURRENT_FETCHES = 8
_GIVE_UP_AFTER = 5.0
_FILTER_PREFIX = "filter-"

CAUGHT_UP = "caught up"
BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class LagLookup:
    """Asks a feed how far behind cursors are."""

    url: str
    headers: dict[str, str]
    v1_partitions: int | None
    ca_file: str | None = None

    def is_of_feed(self, key: FeedKey) -> bool:
        """Whether the key belongs to this feed."""
        return FeedKey(self.url).url == key.url

    async def lag(self, key: FeedKey, positions: Mapping[int, Position]) -> dict[int, str]:
        """Return the lag of each partition that is stored or listed, in words.

        Makes one discovery, and one fetch for each partition that is not read to its end. Raises
        `FeedError` when the discovery fails and `AuthenticationError` also when a fetch is refused.
        """
        async with (
            http_client(self.headers, Limits(), self.ca_file) as http,
            FeedClient(
                self.url,
                http=http,
                v1_partitions=self.v1_partitions,
                fetch=_fetch_options(key),
                retry=RetryPolicy(give_up_after=_GIVE_UP_AFTER),
            ) as client,
        ):
            info = await client.discover()
            found: dict[int, str] = {}
            limiter = anyio.CapacityLimiter(_CONCURRENT_FETCHES)

            async def look(id: int) -> None:
                async with limiter:
                    found[id] = await _lag(client, id, positions.get(id), info.partitions.get(id))

            async with anyio.create_task_group() as tasks:
                for id in positions.keys() | info.partitions.keys():
                    tasks.start_soon(look, id)
        return found


async def _lag(
    client: FeedClient, id: int, stored: Position | None, listed: Partition | None
) -> str:
    if stored is not None and stored.status != "open":
        return stored.status
    if listed is None:
        return "no longer listed"
    if stored is None:
        return _not_begun(listed)
    if listed.closed and listed.last_cursor == stored.cursor:
        return CAUGHT_UP
    try:
        return await _probe(client, id, stored.cursor)
    except AuthenticationError:
        raise
    except FeedError as error:
        return f"unknown ({type(error).__name__})"


def _not_begun(listed: Partition) -> str:
    if listed.starts_after is not None:
        return f"not begun, starts after {listed.starts_after}"
    if listed.cursor_from:
        return f"not begun, takes over from {', '.join(map(str, listed.cursor_from))}"
    return "not begun"


async def _probe(client: FeedClient, id: int, cursor: str) -> str:
    """Fetch once: a cursor is opaque, so nothing else says whether events follow it."""
    last = cursor
    async with client.fetch(id, cursor) as batches:
        async for batch in batches:
            if batch.events:
                return BEHIND
            last = batch.cursor
    return CAUGHT_UP if last == cursor else f"{BEHIND}, no event at once"


def _fetch_options(key: FeedKey) -> FetchOptions:
    """Return options for the selection of events that the key's cursors belong to."""
    pairs = dict(key.filters)
    return FetchOptions(
        page_size_hint=1,
        filters={
            name.removeprefix(_FILTER_PREFIX): value
            for name, value in pairs.items()
            if name.startswith(_FILTER_PREFIX)
        },
        event_types=_types(pairs, "event-types"),
        skip_event_types=_types(pairs, "skip-event-types"),
    )


def _types(pairs: Mapping[str, str], name: str) -> list[str]:
    return pairs[name].split(";") if name in pairs else []
