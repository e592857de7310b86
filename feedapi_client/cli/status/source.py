"""Where ``feedapi status`` looks: a monitor, or a feed and a cursor store.

Both give JSON of the form of a monitor's ``/status``.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any, Protocol

import httpx
import typer

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.common.feed_choice import FeedChoice
from feedapi_client.cli.common.feed_url import checked_url
from feedapi_client.cli.common.stores import TABLE
from feedapi_client.cli.cursors.feed_positions import FeedPositions, load_feeds
from feedapi_client.cli.cursors.lag import BEHIND, CAUGHT_UP, LagLookup
from feedapi_client.cli.cursors.selection import Selection

_TIMEOUT = 20.0
_MAX_BYTES = 64 * 1024 * 1024


class StatusSource(Protocol):
    """Something that knows what consumers do."""

    async def load(self) -> dict[str, Any]:
        """Return the status. Raises `CommandError` and `FeedError`."""
        ...


class RunningMonitor:
    """A monitor beside a consumer, at HOST:PORT or a URL."""

    def __init__(self, target: str, headers: dict[str, str]) -> None:
        url = target if "://" in target else f"http://{target}"
        try:
            self._url = httpx.URL(url.rstrip("/") + "/status")
        except httpx.InvalidURL:
            raise typer.BadParameter(
                "give the HOST:PORT of a monitor, or a feed's URL with --store"
            ) from None
        self._headers = headers

    async def load(self) -> dict[str, Any]:
        """See `StatusSource.load`."""
        where = f"{self._url.host}:{self._url.port or ''}".rstrip(":")
        try:
            async with httpx.AsyncClient(timeout=_TIMEOUT, headers=self._headers) as client:
                answer = await client.get(self._url)
            status = answer.json()
            if answer.status_code == httpx.codes.OK and "process" in status:
                return dict(status)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise CommandError(f"no monitor answers at {where}: {reason}") from None
        except (ValueError, TypeError):
            pass
        raise CommandError(
            f"what answers at {where} is no monitor. For a feed say where its cursors are: --store"
        )


class FeedAndStore:
    """A feed, and the cursors that a consumer has committed."""

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        store: str,
        name: str | None,
        v1_partitions: int | None,
    ) -> None:
        self._lookup = LagLookup(checked_url(url), headers, v1_partitions)
        self._selection = Selection(store, TABLE, FeedChoice(None, name))

    async def load(self) -> dict[str, Any]:
        """See `StatusSource.load`."""
        feeds = await load_feeds(self._selection, self._lookup)
        return {"consumers": [_consumer(feed) for feed in feeds], "blocked": None}


def _consumer(feed: FeedPositions) -> dict[str, Any]:
    partitions = [_partition(feed, id) for id in feed.partitions()]
    return {
        "feed": feed.key.url,
        "name": feed.key.name,
        "time": datetime.now(UTC).isoformat(),
        "health": None,
        "states": Counter(each["state"] for each in partitions),
        "partitions": partitions,
        "reports": [],
    }


def _partition(feed: FeedPositions, id: int) -> dict[str, Any]:
    position = feed.positions.get(id)
    lag = (feed.lag or {}).get(id, "")
    return {
        "id": id,
        "state": lag.split(",")[0].split(" (")[0],
        "caught_up": lag == CAUGHT_UP if lag == CAUGHT_UP or lag.startswith(BEHIND) else None,
        "error": lag if "," in lag or "(" in lag else None,
        "cursor": position.cursor if position else None,
        "commits": position.revision if position else 0,
    }
