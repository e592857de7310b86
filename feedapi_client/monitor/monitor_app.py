"""`Monitor`: the ASGI application."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib.resources import files
from ipaddress import ip_address
from typing import Any

import orjson
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from feedapi_client.consumer import FeedConsumer
from feedapi_client.monitor.exposition import Exposition
from feedapi_client.monitor.snapshots import Snapshots
from feedapi_client.monitor.status_json import Quarantined, health_json, status_json
from feedapi_client.quarantine.quarantine_store import QuarantineStore

HEADERS = {
    # Nothing from elsewhere, and no script but the files beside the page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_JSON = "application/json"


class Monitor:
    """An ASGI application that shows what consumers do; see `feedapi_client.monitor`.

    Mount it in an application that runs in the event loop of the consumers, at any path. To have it
    on a port of its own, use `serve`. The consumers need not be open.

    Concurrency: a consumer may have several monitors.

    Arguments:
        consumers: one or more.
        quarantine: where quarantined events are; None for beside the cursors of each consumer.
        hosts: names that requests may be made to, in their Host header, beside addresses; None for
            any. `serve` takes ``localhost`` and the machine's own name, so that no page of another
            site can read the monitor by a name that resolves to this machine.
    """

    def __init__(
        self,
        *consumers: FeedConsumer,
        quarantine: QuarantineStore | None = None,
        hosts: Collection[str] | None = None,
        _snapshots: Snapshots | None = None,
    ) -> None:
        self._snapshots = _snapshots or Snapshots(consumers, quarantine)
        self._hosts = None if hosts is None else frozenset(name.lower() for name in hosts)
        self._exposition = Exposition(consumers)
        self._texts: dict[str, tuple[float, bytes]] = {}
        self._app = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
                Route("/status", self._status),
                Route("/", _static("index.html")),
                *(Route(f"/{name}", _static(name)) for name in static_files()),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Each answer has `HEADERS`, an error too."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "http" and not self._is_own(Headers(scope=scope).get("host", "")):
            refused = Response("this monitor has another name: see hosts=", 421)
            await refused(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)

    def _is_own(self, host: str) -> bool:
        """Whether a Host header names this monitor: by an address, or by one of its names."""
        if self._hosts is None:
            return True
        name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0]
        name = name or host
        try:
            ip_address(name)
        except ValueError:
            return name.lower() in self._hosts
        return True

    def close(self) -> None:
        """Stop observing the consumers. `serve` calls it."""
        self._exposition.close()

    async def _healthz(self, _: Request) -> Response:
        return await self._probe("live")

    async def _readyz(self, _: Request) -> Response:
        return await self._probe("ready")

    async def _probe(self, which: str) -> Response:
        health = health_json(await self._snapshots.look())
        text = orjson.dumps(health)
        return Response(text, 200 if health[which] else 503, media_type=_JSON)

    async def _status(self, _: Request) -> Response:
        seen = await self._snapshots.look()
        quarantined: Sequence[Quarantined] = [None] * len(seen.snapshots)
        if seen.blocked is not None:
            return Response(orjson.dumps(status_json(seen, quarantined)), media_type=_JSON)
        quarantined = await self._snapshots.quarantined()
        return self._kept(_JSON, seen.taken, lambda: orjson.dumps(status_json(seen, quarantined)))

    async def _metrics(self, request: Request) -> Response:
        seen, accept = await self._snapshots.look(), request.headers.get("accept", "")
        if seen.blocked is not None:
            return Response("the event loop does not answer", 503)
        media_type = choose_encoder(accept)[1]  # one of a few
        return self._kept(
            media_type, seen.taken, lambda: self._exposition.render(accept, seen.snapshots)
        )

    def _kept(self, media_type: str, taken: float, render: Callable[[], bytes]) -> Response:
        """Render a text once for each snapshot, whoever asks for it."""
        found = self._texts.get(media_type)
        if found is None or found[0] < taken:
            found = self._texts[media_type] = taken, render()
        return Response(found[1], media_type=media_type)


@cache
def static_files() -> dict[str, bytes]:
    """Return the page, its style and its scripts, by name."""
    folder = files("feedapi_client.monitor") / "static"
    return {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if entry.name.endswith(tuple(_TYPES))
    }


def _static(name: str) -> Any:
    content = static_files()[name]
    media_type = _TYPES[name[name.rindex(".") :]]

    async def respond(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return respond
