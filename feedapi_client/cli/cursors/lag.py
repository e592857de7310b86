"""How far behind stored cursors are, as far as the feed can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import anyio

from feedapi_client.cli.common.http_client import http_client
from feedapi_client.client import FeedClient
from feedapi_client.errors import AuthenticationError, FeedError
from feedapi_client.model import FeedInfo, FeedKey, Partition, Position
from feedapi_client.options import FetchOptions, Limits, RetryPolicy

_CONCURRENT = 8
_GIVE_UP_AFTER = 5.0
_FILTER = "filter-"

CAUGHT_UP = "caught up"
BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class FeedLag:
    """The feed's partitions, and for each one stored or listed what a person would want to know."""

    info: FeedInfo
    lag: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Lookup:
    """A feed to ask."""

    url: str
    headers: dict[str, str]
    v1_partitions: int | None

    def matches(self, key: FeedKey) -> bool:
        """Whether the key is one of this feed."""
        return FeedKey(self.url).url == key.url

    async def lag(self, key: FeedKey, positions: Mapping[int, Position]) -> FeedLag:
        """One discovery, and one fetch for each partition that is not drained."""
        retry, options = RetryPolicy(give_up_after=_GIVE_UP_AFTER), _options(key)
        async with (
            http_client(self.headers, Limits()) as http,
            FeedClient(
                self.url, http=http, v1_partitions=self.v1_partitions, fetch=options, retry=retry
            ) as client,
        ):
            info = await client.discover()
            found: dict[int, str] = {}
            limiter = anyio.CapacityLimiter(_CONCURRENT)

            async def look(id: int) -> None:
                async with limiter:
                    found[id] = await _state(client, info.partitions.get(id), id, positions.get(id))

            async with anyio.create_task_group() as tasks:
                for id in positions.keys() | info.partitions.keys():
                    tasks.start_soon(look, id)
        return FeedLag(info, found)


async def _state(
    client: FeedClient, listed: Partition | None, id: int, stored: Position | None
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
    """A cursor is opaque: only a fetch says whether there is something behind it."""
    last = cursor
    async with client.fetch(id, cursor) as batches:
        async for batch in batches:
            if batch.events:
                return BEHIND
            last = batch.cursor
    return CAUGHT_UP if last == cursor else f"{BEHIND}, no event at once"


def _options(key: FeedKey) -> FetchOptions:
    """The selection of events that the key's cursors belong to."""
    pairs = dict(key.filters)
    return FetchOptions(
        page_size_hint=1,
        filters={
            name.removeprefix(_FILTER): value
            for name, value in pairs.items()
            if name.startswith(_FILTER)
        },
        event_types=_types(pairs, "event-types"),
        skip_event_types=_types(pairs, "skip-event-types"),
    )


def _types(pairs: Mapping[str, str], name: str) -> list[str]:
    return pairs[name].split(";") if name in pairs else []
