"""``feedapi status``: what a consumer does, by its monitor, or by a feed and a cursor store.

Both give JSON of the form of a monitor's ``/status``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from feedapi_client.cli.cursors_ls import CursorsLs, positions_and_lags
from feedapi_client.cli.feed_options import Connection, Json, V1Partitions, checked_url, finite
from feedapi_client.cli.reporting import CommandError, run_async
from feedapi_client.cli.store_options import Chosen, StorePlace

if TYPE_CHECKING:
    from feedapi_client.operations import FeedPositions

_TIMEOUT = 20.0


@dataclass(frozen=True, kw_only=True)
class ShowStatus:
    """Options of ``feedapi status``."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="MONITOR|URL",
            help="A monitor (localhost:9464), or the URL of a feed whose cursors are in --store.",
        ),
    ]
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            envvar="FEEDAPI_STORE",
            metavar="STORE",
            help="Ask the feed at URL, and this cursor store, instead of a monitor; or env:NAME.",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="The consumer; needed when the store holds several."
        ),
    ] = None
    interval: Annotated[
        float,
        typer.Option(
            "--interval",
            min=0.1,
            callback=finite,
            metavar="SECONDS",
            help="Time between two looks.",
        ),
    ] = 2.0
    once: Annotated[
        bool, typer.Option("--once", help="Print it once; so it is where stdout is no terminal.")
    ] = False
    json: Json = False
    v1_partitions: V1Partitions = None
    connection: Connection


def show_status(options: ShowStatus) -> None:
    """Show what a consumer does now, live, like top.

    From the monitor that runs beside it (--monitor of 'run', 'cat' and 'relay'): states, rates,
    failures, what needs attention first. Or, for a consumer without one, from the feed and the
    cursor store: how far each partition is committed. That asks the feed once for each partition.
    """
    from feedapi_client.cli.status_view import show

    options.connection.check()
    source: StatusSource = RunningMonitor(options.target, options.connection)
    if options.store is not None and "://" in options.target:
        source = FeedAndStore(options, options.store)
    try:
        run_async(show, source, options.interval, options.once, options.json)
    except KeyboardInterrupt:
        raise typer.Exit from None  # the way to leave a live view


class StatusSource(Protocol):
    """Something that knows what consumers do."""

    async def load(self) -> dict[str, Any]:
        """Return the status. Raises `CommandError` and `FeedError`."""
        ...


class RunningMonitor:
    """A monitor beside a consumer, at HOST:PORT or a URL."""

    def __init__(self, target: str, connection: Connection) -> None:
        import httpx

        url = target if "://" in target else f"http://{target}"
        try:
            self._url = httpx.URL(url.rstrip("/") + "/status")
        except httpx.InvalidURL:
            raise typer.BadParameter(
                "give the HOST:PORT of a monitor, or a feed's URL with --store"
            ) from None
        self._connection = connection

    async def load(self) -> dict[str, Any]:
        """See `StatusSource.load`."""
        import httpx

        where = f"{self._url.host}:{self._url.port or ''}".rstrip(":")
        try:
            async with self._connection.client() as given, httpx.AsyncClient() as plain:
                answer = await (given or plain).get(self._url, timeout=_TIMEOUT)
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

    def __init__(self, options: ShowStatus, store: str) -> None:
        self._asked = CursorsLs(
            place=StorePlace(store=store),
            chosen=Chosen(name=options.name),
            url=checked_url(options.target),
            v1_partitions=options.v1_partitions,
            connection=options.connection,
        )

    async def load(self) -> dict[str, Any]:
        """See `StatusSource.load`."""
        feeds = await positions_and_lags(self._asked)
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
    from feedapi_client.operations import LagState

    position = feed.positions.get(id)
    assert feed.lag is not None
    lag = feed.lag[id]
    known = lag.state in (LagState.CAUGHT_UP, LagState.BEHIND)
    return {
        "id": id,
        "state": lag.state.value,
        "caught_up": lag.state is LagState.CAUGHT_UP if known else None,
        "error": str(lag) if lag.detail else None,
        "cursor": position.cursor if position else None,
        "commits": position.revision if position else 0,
    }
