"""Feed URLs on the command line."""

from __future__ import annotations

import typer

from feedapi_client.errors import FeedError

_MAX_PORT = 65535


def checked_url(url: str, option: str = "URL") -> str:
    """Return the URL. Raises `typer.BadParameter` when no feed can have it."""
    from feedapi_client.http.urls import FeedURL
    from feedapi_client.model import FeedKey

    try:
        _, host, port = FeedURL.parse(url).origin
        FeedKey(url)
    except FeedError as error:
        raise typer.BadParameter(f"{option}: {error.message}") from None
    except ValueError as error:
        # Only its type: the reason may quote a part of a password.
        name = type(error).__name__
        raise typer.BadParameter(f"{option}: the feed's URL can't be read ({name})") from None
    if port is not None and not 0 < port <= _MAX_PORT:
        raise typer.BadParameter(f"{option}: the port of the feed's URL is out of range")
    # Only an IPv6 address may hold "%", before its zone.
    if not host.isprintable() or " " in host or ("%" in host and ":" not in host):
        raise typer.BadParameter(f"{option}: the host of the feed's URL is no name of a host")
    return url
