"""`Monitor`: the ASGI application."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from feedapi_client.consumer import FeedConsumer
from feedapi_client.monitor.metrics import Metrics
from feedapi_client.monitor.quarantine import QuarantineView
from feedapi_client.monitor.snapshot import Source
from feedapi_client.monitor.source import SameLoop
from feedapi_client.monitor.status_json import Quarantined, health_json, status_json
from feedapi_client.quarantine.base import QuarantineStore

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
        _source: Source | None = None,
    ) -> None:
        if not consumers:
            raise TypeError("a Monitor needs a consumer")
        self._source: Source = _source or SameLoop(consumers)
        self._metrics = Metrics(consumers)
        self._quarantines = [QuarantineView(consumer, quarantine) for consumer in consumers]
        self._app = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics_text),
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
        self._metrics.close()

    async def _healthz(self, _: Request) -> Response:
        return await self._probe("live")

    async def _readyz(self, _: Request) -> Response:
        return await self._probe("ready")

    async def _probe(self, which: str) -> Response:
        health = health_json(await self._source.observe())
        return _json(health, 200 if health[which] else 503)

    async def _status(self, _: Request) -> Response:
        observation = await self._source.observe()
        quarantined: list[Quarantined] = [None] * len(observation.snapshots)
        if observation.blocked is None:
            quarantined = await self._source.call(self._read_quarantines)
        return _json(status_json(observation, quarantined))

    async def _read_quarantines(self) -> Sequence[Quarantined]:
        return [await view.read() for view in self._quarantines]

    async def _metrics_text(self, request: Request) -> Response:
        try:
            text, media_type = await self._source.call(
                self._metrics.render, request.headers.get("accept", "")
            )
        except TimeoutError:
            return Response("the event loop does not answer", 503)
        return Response(text, media_type=media_type)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type=_JSON)


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
