"""How far behind stored cursors are, as far as the feed can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """How far behind a partition is. `detail` says more, "" where there is nothing to say."""

    state: LagState
    detail: str = ""

    def __str__(self) -> str:
        if not self.detail:
            return self.state.value
        if self.state is LagState.UNKNOWN:
            return f"{self.state.value} ({self.detail})"
        return f"{self.state.value}, {self.detail}"


async def lag(
    feed: FeedAccess, key: FeedKey, positions: Mapping[int, Position]
) -> dict[int, PartitionLag]:
    """Return the lag of each partition that is stored or listed.

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
        found: dict[int, PartitionLag] = {}
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
) -> PartitionLag:
    if stored is not None and stored.status != "open":
        return PartitionLag(LagState(stored.status))
    if listed is None:
        return PartitionLag(LagState.NOT_LISTED)
    if stored is None:
        return PartitionLag(LagState.NOT_BEGUN, _origin(listed))
    if listed.closed and listed.last_cursor == stored.cursor:
        return PartitionLag(LagState.CAUGHT_UP)
    try:
        return await _probe(client, id, stored.cursor)
    except AuthenticationError:
        raise
    except FeedError as error:
        return PartitionLag(LagState.UNKNOWN, type(error).__name__)


def _origin(listed: Partition) -> str:
    if listed.starts_after is not None:
        return f"starts after {listed.starts_after}"
    if listed.cursor_from:
        return f"takes over from {', '.join(map(str, listed.cursor_from))}"
    return ""


async def _probe(client: FeedClient, id: int, cursor: str) -> PartitionLag:
    info = client.info or await client.discover()
    async with client.open(info, id, cursor) as response:
        reader = response.reader
        async for chunk in response:
            if any(batch.events for batch in reader.feed(chunk)):
                return PartitionLag(LagState.BEHIND)
            reader.check()
        if any(batch.events for batch in reader.finish().batches) or reader.held is not None:
            return PartitionLag(LagState.BEHIND)
    if reader.last_checkpoint in (None, cursor):
        return PartitionLag(LagState.CAUGHT_UP)
    return PartitionLag(LagState.BEHIND, "no event at once")


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
