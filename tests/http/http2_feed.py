"""A feed of four partitions whose pages are as long as the whole partition, for hypercorn."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

PARTITION_BYTES = 20_000_000
"""More than the 16 MiB that httpcore lets a server send on one HTTP/2 connection unread."""
BLOCK = b"".join(b'{"data":{"n":%d,"x":"%s"}}\n' % (n, b"x" * 200) for n in range(100))
DISCOVERY = b'{"token":"t","partitions":[%s]}' % b",".join(b'{"id":"%d"}' % n for n in range(4))


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The ASGI application. A cursor is the number of bytes before it."""
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if not scope["path"].endswith("/events"):
        await send({"type": "http.response.body", "body": DISCOVERY})
        return
    query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode()).items()}
    at = 0 if query["cursor"] == "_first" else int(query["cursor"])
    end = PARTITION_BYTES
    if "pagesizehint" in query:
        end = min(end, at + int(query["pagesizehint"]) // 100 * len(BLOCK))
    while at < end:
        at += len(BLOCK)
        body = BLOCK + b'{"cursor":"%d"}\n' % at
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b'{"cursor":"%d"}\n' % at})
