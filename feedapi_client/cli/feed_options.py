"""The options of commands that ask a feed, and the HTTP client that they make.

Credentials come from environment variables and files. On the command line they would be visible to
other users of the machine and end up in the shell's history.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from feedapi_client.arguments import environment_value
from feedapi_client.errors import FeedError
from feedapi_client.options import FetchOptions, Limits

if TYPE_CHECKING:
    import ssl

    import httpx

# The name of a variable as people write them. A token rarely looks like one.
# Connections beyond those of fetches, for discoveries.
_SPARE_CONNECTIONS = 4
_MAX_PORT = 65535
CONNECTION = "Connection"
EVENTS = "Events"


def finite(value: float | None) -> float | None:
    """Return the value of an option. Raises `typer.BadParameter` for nan and infinity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number of this kind")
    return value


def pairs(
    values: list[str] | None, option: str, form: str = "NAME=VALUE, each NAME once"
) -> dict[str, str]:
    """Return the values of a repeatable NAME=VALUE option as a dictionary.

    `form` says in messages what the option takes.

    Raises `typer.BadParameter` for a value of another form and for a name given twice.
    """
    found = {
        name: value
        for name, equals, value in (text.partition("=") for text in values or ())
        if name and equals
    }
    if len(found) < len(values or ()):
        raise typer.BadParameter(f"{option} takes {form}")
    return found


def edges(values: list[str] | None) -> dict[int, int | None]:
    """Return the values of ``--lineage`` as `FeedConsumer` takes them, from child to parent.

    Raises `typer.BadParameter` for another form, and for a child with two parents.
    """
    from feedapi_client.lineage.graph import parse_lineage

    try:
        return parse_lineage(",".join(values)) if values else {}
    except ValueError as error:
        raise typer.BadParameter(f"--lineage {error}") from None


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


def name_of_feed(value: str | None) -> str | None:
    """Return the name of a feed. Raises `typer.BadParameter` for one that no feed can have."""
    from feedapi_client.model import FeedKey

    try:
        return value if value is None else FeedKey.named(value).feed_name
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


# ------------------------------------------------------------------ options with a default for each

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The feed. Its query is sent with every request.")
]
V1Partitions = Annotated[
    int | None,
    typer.Option(
        "--v1-partitions",
        min=1,
        max=32768,
        metavar="N",
        help="Number of partitions of a ZeroEventHub (v1) feed, which does not list them.",
    ),
]
ONE_SHOT = 10.0
"""Seconds for which commands that ask a feed once wait for it (R14)."""
GiveUpAfter = Annotated[
    float | None,
    typer.Option(
        "--give-up-after",
        min=0,
        callback=finite,
        metavar="SECONDS",
        help="Maximum time to retry while the feed can't be reached.",
    ),
]
Lineage = Annotated[
    list[str] | None,
    typer.Option(
        "--lineage",
        metavar="CHILD:PARENT",
        help="Read CHILD after PARENT, where the feed leaves that out (1:0). Repeatable.",
    ),
]
FeedName = Annotated[
    str | None,
    typer.Option(
        "--feed-name",
        callback=name_of_feed,
        metavar="NAME",
        help="Keep cursors under this name of the feed, not its URL: it may move.",
    ),
]
OnlyPartitions = Annotated[
    list[int] | None,
    typer.Option(
        "--partition", "-p", min=0, max=32767, metavar="ID", help="Only this partition. Repeatable."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="No progress on stderr (shown only where stderr is a terminal)."
    ),
]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Go on at the end of the feed, until Ctrl-C.")
]
Monitor = Annotated[
    str | None,
    typer.Option(
        "--monitor",
        metavar="HOST:PORT",
        help="Serve probes, metrics and a status page there (extra monitor).",
    ),
]


class StartFrom(StrEnum):
    """Where a new name begins."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptions:
    """Which events of a feed are asked for."""

    panel: ClassVar[str] = EVENTS

    event_types: Annotated[
        list[str] | None,
        typer.Option("--event-type", metavar="TYPE", help="Only events of this type. Repeatable."),
    ] = None
    skip_event_types: Annotated[
        list[str] | None,
        typer.Option(
            "--skip-event-type", metavar="TYPE", help="No events of this type. Repeatable."
        ),
    ] = None
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="NAME=VALUE",
            help="Only events that the feed's filter selects. Repeatable.",
        ),
    ] = None

    def fetch(
        self,
        *,
        page_size_hint: int | None = None,
        stream: bool = False,
        v1_headers: list[str] | None = None,
    ) -> FetchOptions:
        """Return the fetch options. Raises `typer.BadParameter` for what does not go together."""
        try:
            return FetchOptions(
                page_size_hint=page_size_hint,
                stream=stream,
                filters=pairs(self.filters, "--filter"),
                event_types=self.event_types or (),
                skip_event_types=self.skip_event_types or (),
                v1_headers=v1_headers or (),
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


# ---------------------------------------------------------------------- connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How a feed is reached: credentials and certificates. Proxies are those of the environment.

    `client` raises `typer.BadParameter` for options that don't go together.
    """

    panel: ClassVar[str] = CONNECTION

    auth_env: Annotated[
        str | None,
        typer.Option(
            "--auth-env",
            metavar="NAME",
            help="Environment variable that holds the value of the Authorization header.",
        ),
    ] = None
    header_env: Annotated[
        list[str] | None,
        typer.Option(
            "--header-env",
            metavar="HEADER=NAME",
            help="A request header, its value in an environment variable. Repeatable.",
        ),
    ] = None
    token_file: Annotated[
        str | None,
        typer.Option(
            "--token-file",
            envvar="FEEDAPI_TOKEN_FILE",
            metavar="FILE",
            help="Send the token in this file, which is read again when it changes.",
        ),
    ] = None
    oauth_token_url: Annotated[
        str | None,
        typer.Option(
            "--oauth-token-url",
            envvar="FEEDAPI_OAUTH_TOKEN_URL",
            metavar="URL",
            help="Get tokens there by OAuth client credentials, and renew them.",
        ),
    ] = None
    oauth_client_id: Annotated[
        str | None,
        typer.Option(
            "--oauth-client-id",
            envvar="FEEDAPI_OAUTH_CLIENT_ID",
            metavar="ID",
            help="The client of --oauth-token-url.",
        ),
    ] = None
    oauth_secret_env: Annotated[
        str | None,
        typer.Option(
            "--oauth-secret-env",
            metavar="NAME",
            help="Environment variable that holds the client's secret.",
        ),
    ] = None
    oauth_scope: Annotated[
        str | None, typer.Option("--oauth-scope", metavar="SCOPE", help="The scope to ask for.")
    ] = None
    ca_file: Annotated[
        str | None,
        typer.Option(
            "--ca-file",
            "--ca",
            envvar="FEEDAPI_CA_FILE",
            metavar="FILE",
            help="Trust the certificates in this PEM file, in place of the public ones.",
        ),
    ] = None
    cert: Annotated[
        str | None,
        typer.Option(
            "--cert",
            envvar="FEEDAPI_CERT",
            metavar="FILE",
            help="Show the certificate in this PEM file to the publisher (mutual TLS).",
        ),
    ] = None
    cert_key: Annotated[
        str | None,
        typer.Option(
            "--cert-key",
            "--key",
            envvar="FEEDAPI_KEY",
            metavar="FILE",
            help="The key of --cert, where that file does not hold it.",
        ),
    ] = None

    def headers(self) -> dict[str, str]:
        """Return the request headers that ``--auth-env`` and ``--header-env`` ask for.

        Raises `typer.BadParameter` when a variable is not set or its value can't be sent.
        """
        variables = pairs(
            self.header_env,
            "--header-env",
            "HEADER=NAME, each header once. NAME is an environment variable that holds the value: "
            "arguments are visible to others",
        )
        values = {
            header: _header_value(variable, f"--header-env {header}")
            for header, variable in variables.items()
        }
        if self.auth_env is not None:
            values["Authorization"] = _header_value(self.auth_env, "--auth-env")
        return values

    def check(self) -> None:
        """Raise `typer.BadParameter` for options that don't go together, before anything runs."""
        if self.cert_key is not None and self.cert is None:
            raise typer.BadParameter("--cert-key goes with --cert")
        parts = (self.oauth_token_url, self.oauth_client_id, self.oauth_secret_env)
        if any(parts) and not all(parts):
            raise typer.BadParameter(
                "--oauth-token-url, --oauth-client-id and --oauth-secret-env go together"
            )
        if self.oauth_token_url is not None and self.token_file is not None:
            raise typer.BadParameter("give --token-file or --oauth-token-url, not both")
        self.headers()

    @asynccontextmanager
    async def client(
        self, limits: Limits | None = None, *, anonymous: bool = False, own: bool = True
    ) -> AsyncIterator[httpx.AsyncClient | None]:
        """Open a client with these credentials, and with enough connections for `limits`.

        Gives None when there is nothing to set: the library's own client does then, unless `own` is
        False. The client is closed at the end of the block. `anonymous` leaves out everything but
        ``--ca-file``.

        Raises `typer.BadParameter`.
        """
        self.check()
        headers = {} if anonymous else self.headers()
        auth = None if anonymous else self._auth()
        verify = self._verify(anonymous=anonymous)
        if own and not headers and verify is True and auth is None:
            yield None
            return
        import httpx

        from feedapi_client.http.environment import ByEnvironment, public_certificates

        limits = limits or Limits()
        size = limits.max_concurrent_fetches + _SPARE_CONNECTIONS
        pool = httpx.Limits(max_connections=size, max_keepalive_connections=size)
        trust = public_certificates() if verify is True else verify
        transport = ByEnvironment(httpx.AsyncHTTPTransport, verify=trust, limits=pool)
        async with httpx.AsyncClient(
            transport=transport, headers=headers, timeout=limits.request_timeout, auth=auth
        ) as client:
            yield client

    def _auth(self) -> httpx.Auth | None:
        """Return what sends and renews tokens; None without one."""
        from feedapi_client.http.auth import OAuthClientCredentials, TokenFile

        if self.token_file is not None:
            return TokenFile(self.token_file)
        if self.oauth_token_url is None:
            return None
        assert self.oauth_client_id is not None
        assert self.oauth_secret_env is not None
        return OAuthClientCredentials(
            self.oauth_token_url,
            client_id=self.oauth_client_id,
            client_secret=_header_value(self.oauth_secret_env, "--oauth-secret-env"),
            scope=self.oauth_scope,
        )

    def _verify(self, *, anonymous: bool) -> ssl.SSLContext | bool:
        """Return what httpx takes as `verify`."""
        cert = None if anonymous else self.cert
        if self.ca_file is None and cert is None:
            return True
        from feedapi_client.http.auth import showing, trusted
        from feedapi_client.http.environment import public_certificates

        try:
            given = self.ca_file
            context = public_certificates() if given is None else trusted(given)
        except ValueError as error:
            raise typer.BadParameter(f"--ca-file: {error}") from None
        try:
            if cert is not None:
                showing(context, cert, self.cert_key)
        except ValueError as error:
            raise typer.BadParameter(f"--cert: {error}") from None
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBesideKey(Connection):
    """A `Connection` for commands where ``--key`` is the key of an event."""

    cert_key: Annotated[
        str | None,
        typer.Option(
            "--cert-key",
            envvar="FEEDAPI_KEY",
            metavar="FILE",
            help="The key of --cert, where that file does not hold it.",
        ),
    ] = None


def _header_value(variable: str, option: str) -> str:
    try:
        value = environment_value(variable, option)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not value.isascii() or not value.isprintable():
        raise typer.BadParameter(
            f"{option}: the value of the environment variable {variable} can't be sent as a "
            "header: it is not printable ASCII"
        )
    return value
