"""``feedapi status``: what a consumer does, by its monitor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from feedapi_client.cli.feed_options import Connection, Json, finite
from feedapi_client.cli.reporting import CommandError, run_async
from feedapi_client.cli.signature import REMOVED

_TIMEOUT = 20.0


@dataclass(frozen=True, kw_only=True)
class ShowStatus:
    """Options of ``feedapi status``."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="MONITOR",
            help="A monitor: localhost:9464, or its URL.",
        ),
    ]
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
    connection: Connection


def show_status(options: ShowStatus) -> None:
    """Show what a consumer does now, live, like top.

    From the monitor that runs beside it (--monitor of 'run', 'cat' and 'relay'): states, rates,
    failures, what needs attention first. How far a consumer without one has come, 'feedapi cursors
    ls --url' tells.
    """
    from feedapi_client.cli.status_view import show

    options.connection.check()
    source = RunningMonitor(options.target, options.connection)
    try:
        run_async(show, source, options.interval, options.once, options.json)
    except KeyboardInterrupt:
        raise typer.Exit from None  # the way to leave a live view


class RunningMonitor:
    """A monitor beside a consumer, at HOST:PORT or a URL."""

    def __init__(self, target: str, connection: Connection) -> None:
        import httpx

        url = target if "://" in target else f"http://{target}"
        try:
            self._url = httpx.URL(url.rstrip("/") + "/status")
        except httpx.InvalidURL:
            raise typer.BadParameter("give the HOST:PORT of a monitor") from None
        self._connection = connection

    async def load(self) -> dict[str, Any]:
        """Return the status. Raises `CommandError` where no monitor gives one."""
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
            f"what answers at {where} is no monitor. Of a feed, {REMOVED['status --store']}"
        )
