"""`Monitor`: the ASGI application."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import cache
from importlib.resources import files
from ipaddress import ip_address
from typing import Any

import anyio
import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import StoreError
from feedapi_client.monitor.families import Metrics
from feedapi_client.monitor.snapshots import SameLoop, Source
from feedapi_client.monitor.status_json import Quarantined, health_json, status_json
from feedapi_client.quarantine.quarantine_store import QuarantineStore, quarantine_beside

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
_QUARANTINED_SHOWN = 20
_QUARANTINED_SECONDS = 10.0
"""Time for which the quarantined events that were read are shown again."""
_QUARANTINE_TIMEOUT = 5.0
_KEPT_SECONDS = 0.5
"""Time for which metrics, and a status, that were rendered are given again."""


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
        _source: Source | None = None,
    ) -> None:
        if not consumers:
            raise TypeError("a Monitor needs a consumer")
        self._source: Source = _source or SameLoop(consumers)
        self._hosts = None if hosts is None else frozenset(name.lower() for name in hosts)
        self._metrics = Metrics(consumers)
        self._kept_metrics, self._kept_status = _Kept(), _Kept()
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
        self._metrics.close()

    async def _healthz(self, _: Request) -> Response:
        return await self._probe("live")

    async def _readyz(self, _: Request) -> Response:
        return await self._probe("ready")

    async def _probe(self, which: str) -> Response:
        health = health_json(await self._source.observe())
        return _json(health, 200 if health[which] else 503)

    async def _status(self, _: Request) -> Response:
        return Response(await self._kept_status.get(_JSON, self._status_text), media_type=_JSON)

    async def _status_text(self) -> bytes:
        seen = await self._source.observe()
        quarantined: list[Quarantined] = [None] * len(seen.snapshots)
        if seen.blocked is None:
            quarantined = await self._source.call(self._read_quarantines)
        return orjson.dumps(status_json(seen, quarantined))

    async def _read_quarantines(self) -> Sequence[Quarantined]:
        return [await view.read() for view in self._quarantines]

    async def _metrics_text(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        media_type = self._metrics.media_type(accept)

        async def render() -> bytes:
            text, _ = await self._source.call(self._metrics.render, accept)
            return bytes(text)

        try:
            text = await self._kept_metrics.get(media_type, render)
        except TimeoutError:
            return Response("the event loop does not answer", 503)
        return Response(text, media_type=media_type)


class _Kept:
    """Texts that are rendered at most twice a second, whoever asks for them."""

    def __init__(self) -> None:
        self._rendered: dict[str, tuple[float, bytes]] = {}
        self._lock: anyio.Lock | None = None

    async def get(self, media_type: str, render: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the text of a media type."""
        if self._lock is None:  # here: `serve` is called in another event loop
            self._lock = anyio.Lock()
        async with self._lock:
            found = self._rendered.get(media_type)
            if found is None or time.monotonic() - found[0] >= _KEPT_SECONDS:
                text = await render()
                found = self._rendered[media_type] = (time.monotonic(), text)
        return found[1]


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


class QuarantineView:
    """Reads the oldest quarantined events of one consumer, at most once in 10 seconds.

    It shows where they are and why, no payload.

    Arguments:
        store: None for the one beside the consumer's cursors, if there is one.
    """

    def __init__(self, consumer: FeedConsumer, store: QuarantineStore | None) -> None:
        self._consumer = consumer
        self._store = store
        self._found: dict[str, Any] | None = None
        self._read = -_QUARANTINED_SECONDS

    async def read(self) -> dict[str, Any] | None:
        """Return the first events and whether there are more; None where that can't be said.

        To be called in the event loop of the consumer, whose database this is.
        """
        if time.monotonic() - self._read >= _QUARANTINED_SECONDS:
            self._read = time.monotonic()
            self._found = None
            with anyio.move_on_after(_QUARANTINE_TIMEOUT):
                self._found = await self._load()
        return self._found

    async def _load(self) -> dict[str, Any] | None:
        try:
            store = self._store or quarantine_beside(self._consumer.store)
            events = await store.page(self._consumer.key, limit=_QUARANTINED_SHOWN + 1)
        except StoreError:
            return None  # no quarantine beside these cursors, or nothing was put there ever
        return {
            "more": len(events) > _QUARANTINED_SHOWN,
            "events": [
                {
                    "id": event.id,
                    "partition": event.partition,
                    "error_type": event.error_type,
                    "time": event.time,
                }
                for event in events[:_QUARANTINED_SHOWN]
            ],
        }
