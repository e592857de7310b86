"""`Monitor`: the ASGI application."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import orjson
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
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
    """

    def __init__(
        self,
        *consumers: FeedConsumer,
        quarantine: QuarantineStore | None = None,
        _snapshots: Snapshots | None = None,
    ) -> None:
        self._snapshots = _snapshots or Snapshots(consumers, quarantine)
        self._exposition = Exposition(consumers)
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

        await self._app(scope, receive, send_with_headers)

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
        if seen.blocked is None:
            quarantined = await self._snapshots.quarantined()
        return Response(orjson.dumps(status_json(seen, quarantined)), media_type=_JSON)

    async def _metrics(self, request: Request) -> Response:
        seen = await self._snapshots.look()
        if seen.blocked is not None:
            return Response("the event loop does not answer", 503)
        accept = request.headers.get("accept", "")
        text = self._exposition.render(accept, seen.snapshots)
        return Response(text, media_type=choose_encoder(accept)[1])


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
