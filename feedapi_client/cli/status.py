"""``feedapi status``: what a consumer does, by its monitor."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from feedapi_client.cli.command import (
    REMOVED,
    USAGE,
    CommandError,
    argument,
    command,
    option,
    run_async,
)
from feedapi_client.cli.options import Connection

_TIMEOUT = 20.0


@dataclass(frozen=True, kw_only=True)
class ShowStatus:
    """Options of ``feedapi status``."""

    target: str = argument("MONITOR", "A monitor: localhost:9464, or its URL.")
    interval: float = option("SECONDS", "Time between two looks.", default=2.0, min=0.1)
    once: bool = option(help="Print it once; so it is where stdout is no terminal.", default=False)
    json: bool = option(help="Print JSON.", default=False)
    connection: Connection


@command("status localhost:9464", "status localhost:9464 --once")
def status(o: ShowStatus) -> None:
    """Show what a consumer does now, live, like top.

    From the monitor that runs beside it (--monitor of 'run', 'cat' and 'relay'): states, rates,
    failures, what needs attention first. How far a consumer without one has come, 'feedapi cursors
    ls URL --lag' tells.
    """
    from feedapi_client.cli.status_view import show

    source = RunningMonitor(o.target, o.connection)
    with suppress(KeyboardInterrupt):  # the way to leave a live view
        run_async(show, source, o.interval, o.once, o.json)


class RunningMonitor:
    """A monitor beside a consumer, at HOST:PORT or a URL."""

    def __init__(self, target: str, connection: Connection) -> None:
        import httpx

        url = target if "://" in target else f"http://{target}"
        try:
            self._url = httpx.URL(url.rstrip("/") + "/status")
        except httpx.InvalidURL:
            raise CommandError("give the HOST:PORT of a monitor", USAGE) from None
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
