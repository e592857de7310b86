"""``--monitor HOST:PORT``: a monitor beside the consumer of a command."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from feedapi_client.cli.common.errors import CommandError

if TYPE_CHECKING:
    from feedapi_client.consumer import FeedConsumer

Monitor = Annotated[
    str | None,
    typer.Option(
        "--monitor",
        metavar="HOST:PORT",
        help="Serve probes, metrics and a status page there (extra monitor).",
    ),
]


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
        from feedapi_client.monitor.address import parse_address
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
    print(f"feedapi: monitor at {server.url}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        await server.__aexit__(None, None, None)
