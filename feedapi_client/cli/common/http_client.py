"""The HTTP client of a command: credentials come from environment variables, never from the command line."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import typer

from feedapi_client.cli.common.options import pairs
from feedapi_client.options import FetchOptions, Limits

if TYPE_CHECKING:
    import httpx


def headers_from(auth_env: str | None, header_env: list[str] | None) -> dict[str, str]:
    """The request headers whose values stand in environment variables."""
    wanted = pairs(header_env, "--header-env")
    if auth_env is not None:
        wanted["Authorization"] = auth_env
    return {header: _from_environment(variable) for header, variable in wanted.items()}


def _from_environment(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise typer.BadParameter(f"the environment variable {variable} is not set")
    if not value.isascii() or not value.isprintable():
        raise typer.BadParameter(
            f"the value of the environment variable {variable} can't be sent as a header: it is not printable ASCII"
        )
    return value


@asynccontextmanager
async def http_client(
    headers: dict[str, str], limits: Limits
) -> AsyncIterator[httpx.AsyncClient | None]:
    """A client that sends the headers, as large as `limits` need; None when there are none to send."""
    if not headers:
        yield None
        return
    import httpx

    size = limits.max_concurrent_fetches + 4
    pool = httpx.Limits(max_connections=size, max_keepalive_connections=size)
    async with httpx.AsyncClient(
        headers=headers, timeout=limits.request_timeout, limits=pool
    ) as client:
        yield client


def fetch_options(
    filters: list[str] | None = None,
    event_types: list[str] | None = None,
    skip_event_types: list[str] | None = None,
    *,
    page_size_hint: int | None = None,
    stream: bool = False,
    v1_headers: list[str] | None = None,
) -> FetchOptions:
    """The options as the library has them; what they forbid is a usage error."""
    try:
        return FetchOptions(
            page_size_hint=page_size_hint,
            stream=stream,
            filters=pairs(filters, "--filter"),
            event_types=event_types or (),
            skip_event_types=skip_event_types or (),
            v1_headers=v1_headers or (),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
