"""The HTTP client of a command.

Credentials come from environment variables. On the command line they would be visible to other
users of the machine and end up in the shell's history.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import typer

from feedapi_client.cli.common.options import pairs
from feedapi_client.options import Limits

if TYPE_CHECKING:
    import httpx

# Connections beyond those of fetches, for discoveries.
_SPARE_CONNECTIONS = 4


def headers_from_environment(auth_env: str | None, header_env: list[str] | None) -> dict[str, str]:
    """Return the request headers that ``--auth-env`` and ``--header-env`` ask for.

    Raises `typer.BadParameter` when a variable is not set or its value can't be sent.
    """
    variables = pairs(header_env, "--header-env")
    if auth_env is not None:
        variables["Authorization"] = auth_env
    return {header: _header_value(variable) for header, variable in variables.items()}


def _header_value(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise typer.BadParameter(f"the environment variable {variable} is not set")
    if not value.isascii() or not value.isprintable():
        raise typer.BadParameter(
            f"the value of the environment variable {variable} can't be sent as a header: "
            "it is not printable ASCII"
        )
    return value


@asynccontextmanager
async def http_client(
    headers: dict[str, str], limits: Limits
) -> AsyncIterator[httpx.AsyncClient | None]:
    """Open a client that sends the headers with each request, with enough connections for `limits`.

    Gives None when there are no headers: the library's own client does then. The client is closed
    at the end of the block.
    """
    if not headers:
        yield None
        return
    import httpx

    size = limits.max_concurrent_fetches + _SPARE_CONNECTIONS
    pool = httpx.Limits(max_connections=size, max_keepalive_connections=size)
    async with httpx.AsyncClient(
        headers=headers, timeout=limits.request_timeout, limits=pool
    ) as client:
        yield client
