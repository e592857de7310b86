"""How far behind stored cursors are, as far as the feed can say."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import anyio

from feedapi_client.client import FeedClient
from feedapi_client.errors import AuthenticationError, FeedError
from feedapi_client.model import FeedKey, Partition, Position
from feedapi_client.operations.feed_access import FeedAccess
from feedapi_client.options import FetchOptions

_CONCURRENT_FETCHES = 8
_FILTER_PREFIX = "filter-"


class LagState(StrEnum):
    """Where a stored cursor stands."""

    CAUGHT_UP = "caught up"
    BEHIND = "behind"
    NOT_BEGUN = "not begun"
    DRAINED = "drained"
    SUPERSEDED = "superseded"
    NOT_LISTED = "no longer listed"
    UNKNOWN = "unknown"


async def lag(
    feed: FeedAccess, key: FeedKey, positions: Mapping[int, Position]
) -> dict[int, LagState]:
    """Return where each partition stands that is stored or listed.

    Makes one discovery, and one fetch for each partition that is not read to its end. A cursor is
    opaque: nothing else says whether events follow it, and nothing says how many.

    Arguments:
        feed: how the feed is asked. Its `name` and `fetch` do not count.
        key: of the positions. Its filters are the selection that is asked for.

    Raises:
        FeedError: the discovery fails.
        AuthenticationError: a fetch is refused, too.
    """
    async with feed.client(_fetch_options(key)) as client:
        info = await client.discover()
        found: dict[int, LagState] = {}
        limiter = anyio.CapacityLimiter(_CONCURRENT_FETCHES)

        async def look(id: int) -> None:
            async with limiter:
                found[id] = await _state(client, id, positions.get(id), info.partitions.get(id))

        async with anyio.create_task_group() as tasks:
            for id in positions.keys() | info.partitions.keys():
                tasks.start_soon(look, id)
    return found


async def _state(
    client: FeedClient, id: int, stored: Position | None, listed: Partition | None
) -> LagState:
    if stored is not None and stored.status != "open":
        return LagState(stored.status)
    if listed is None:
        return LagState.NOT_LISTED
    if stored is None:
        return LagState.NOT_BEGUN
    if listed.closed and listed.last_cursor == stored.cursor:
        return LagState.CAUGHT_UP
    last = stored.cursor
    try:
        async with client.fetch(id, stored.cursor) as batches:
            async for batch in batches:
                if batch.events:
                    return LagState.BEHIND
                last = batch.cursor
    except AuthenticationError:
        raise
    except FeedError:
        return LagState.UNKNOWN
    return LagState.CAUGHT_UP if last == stored.cursor else LagState.BEHIND


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
