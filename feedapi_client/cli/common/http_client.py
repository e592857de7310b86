"""The HTTP client of a command.

Credentials come from environment variables. On the command line they would be visible to other
users of the machine and end up in the shell's history.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import typer

from feedapi_client.cli.common.options import pairs
from feedapi_client.options import Limits

if TYPE_CHECKING:
    import ssl

    import httpx

# The name of a variable as people write them. A token rarely looks like one.
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
# Connections beyond those of fetches, for discoveries.
_SPARE_CONNECTIONS = 4


def headers_from_environment(auth_env: str | None, header_env: list[str] | None) -> dict[str, str]:
    """Return the request headers that ``--auth-env`` and ``--header-env`` ask for.

    Raises `typer.BadParameter` when a variable is not set or its value can't be sent.
    """
    variables = pairs(
        header_env,
        "--header-env",
        "HEADER=NAME, each header once. NAME is an environment variable that holds the value: "
        "arguments are visible to others",
    )
    values = {
        header: _header_value(variable, f"--header-env {header}")
        for header, variable in variables.items()
    }
    if auth_env is not None:
        values["Authorization"] = _header_value(auth_env, "--auth-env")
    return values


def _header_value(variable: str, option: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value and _VARIABLE.fullmatch(variable) is None:
        # It may be the secret itself, which no message may repeat.
        raise typer.BadParameter(
            f"{option} takes the name of an environment variable, not the value: arguments are "
            "visible to others. If that was a secret, it is in the history of your shell now"
        )
    if not value:
        raise typer.BadParameter(f"{option}: the environment variable {variable} is not set")
    if not value.isascii() or not value.isprintable():
        raise typer.BadParameter(
            f"{option}: the value of the environment variable {variable} can't be sent as a "
            "header: it is not printable ASCII"
        )
    return value


@asynccontextmanager
async def http_client(
    headers: dict[str, str], limits: Limits, ca_file: str | None = None
) -> AsyncIterator[httpx.AsyncClient | None]:
    """Open a client that sends the headers with each request, with enough connections for `limits`.

    With `ca_file` it trusts the certificates in that file only. Gives None when there are neither:
    the library's own client does then. The client is closed at the end of the block. Raises
    `typer.BadParameter` when the file can't be read.
    """
    verify = _trusting(ca_file)
    if not headers and verify is True:
        yield None
        return
    import httpx

    size = limits.max_concurrent_fetches + _SPARE_CONNECTIONS
    pool = httpx.Limits(max_connections=size, max_keepalive_connections=size)
    async with httpx.AsyncClient(
        headers=headers, timeout=limits.request_timeout, limits=pool, verify=verify
    ) as client:
        yield client


def _trusting(ca_file: str | None) -> ssl.SSLContext | bool:
    """Return what httpx takes as `verify`."""
    if ca_file is None:
        return True
    from feedapi_client.http.trust import trusted

    try:
        return trusted(ca_file)
    except ValueError as error:
        raise typer.BadParameter(f"--ca-file: {error}") from None
