"""``--monitor HOST:PORT``: a monitor beside the consumer of a command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import typer

from feedapi_client.cli.reporting import CommandError, say

if TYPE_CHECKING:
    from feedapi_client.consumer import FeedConsumer


_DEFAULT_HOST = "127.0.0.1"
_MAX_PORT = 65535


@asynccontextmanager
async def monitoring(address: str | None, consumer: FeedConsumer) -> AsyncIterator[None]:
    """Serve a monitor of the consumer during the block; nothing without an address.

    Raises `CommandError` when it can't listen or the extra is missing, and `typer.BadParameter`.
    """
    if address is None:
        yield
        return
    try:
        from feedapi_client.monitor import serve
    except ImportError as missing:
        raise CommandError(str(missing)) from None
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise typer.BadParameter(f"--monitor {error}") from None
    server = serve(consumer, host=host, port=port)
    try:
        await server.__aenter__()
    except OSError as error:
        raise CommandError(f"--monitor {host}:{port}: {error.strerror}") from None
    say(f"monitor at {server.url}")
    try:
        yield
    finally:
        await server.__aexit__(None, None, None)


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``[IPv6]:PORT``, ``:PORT`` or ``PORT``.

    Without a host it is the loopback interface. Port 0 is one that is free. Raises ValueError.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
        port = "an IPv6 address without brackets"
    if not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise ValueError("takes HOST:PORT, for example 127.0.0.1:9464 or 0.0.0.0:9464")
    return host or _DEFAULT_HOST, int(port)
