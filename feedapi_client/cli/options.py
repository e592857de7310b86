"""The options that commands share, and what they make of them.

Credentials come from environment variables and files. On the command line they would be visible to
other users of the machine and end up in the shell's history.
"""

from __future__ import annotations

import datetime as dt
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import typer

import feedapi_client
from feedapi_client import operations
from feedapi_client.arguments import environment_value, parse_lineage
from feedapi_client.cli.command import CommandError, Pairs, argument, flag, option, refused
from feedapi_client.cli.terminal import MAX_LINE, say, shown
from feedapi_client.model import MAX_PARTITION, FeedKey
from feedapi_client.options import FetchOptions, Limits, RetryPolicy

if TYPE_CHECKING:
    import httpx

    from feedapi_client.quarantine import QuarantineStore
    from feedapi_client.stores.base import AdministrableStore, CursorStore

T = TypeVar("T")
ONE_SHOT = 10.0
"""Seconds for which commands that ask a feed once wait for it (R14)."""
STORE = (
    "An SQLite file, a database URL (postgresql+psycopg://…), redis://…, "
    "liftbridge://HOST:PORT/STREAM, or env:NAME for one in an environment variable."
)
_UNREACHABLE = "Maximum time to retry while the feed can't be reached."
_KEY = "The key of --cert, where that file does not hold it."
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AMOUNT = (
    r"(?i)(\d+(?:\.\d+)?|\ban?\b)\s*(s|sec|second|m|min|minute|h|hr|hour|d|day|w|week)s?(?![a-z])"
)


def pair(text: str) -> dict[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise ValueError("takes NAME=VALUE")
    return {name: value}


def secret(variable: str) -> str:
    value = environment_value(variable, "")
    if not value.isascii() or not value.isprintable():
        raise ValueError(f"what the environment variable {variable} holds is not printable ASCII")
    return value


def header(text: str) -> dict[str, str]:
    """Return the header that HEADER=NAME says. No message repeats it: it may be the value."""
    name, _, variable = text.partition("=")
    if not name or not variable:
        raise ValueError(
            "takes HEADER=NAME. NAME is an environment variable with the value: arguments are "
            "visible to others"
        )
    return {name: secret(variable)}


def not_empty(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def feed_url(text: str) -> str:
    from feedapi_client.http.urls import FeedURL

    FeedURL.parse(text)
    return text


def address(text: str) -> str:
    """Return HOST:PORT, which may lack the host or be a port alone: on the loopback interface."""
    try:
        parts = urlsplit(f"//{text}" if ":" in text else f"//:{text}")
        if parts.port is not None and not parts.path:
            return f"{parts.hostname or '127.0.0.1'}:{parts.port}"
    except ValueError:
        pass
    raise ValueError("takes HOST:PORT, for example 127.0.0.1:9464 or 0.0.0.0:9464")


def cursor(text: str) -> str:
    from feedapi_client.operations.stored_positions import check_cursor

    check_cursor(text)
    return text


def time(text: str, now: dt.datetime | None = None) -> dt.datetime:
    """Return an ISO 8601 time, a time of today, or a duration "ago", with a time zone.

    Without a zone it is local time, also on a day on which the clocks change.
    """
    now, text = now or dt.datetime.now(dt.UTC), text.strip()
    try:
        amounts = re.findall(_AMOUNT, text)
        if amounts and re.fullmatch(r"(?i)(\s|,|and\b)*ago", re.sub(_AMOUNT, " ", text)):
            parts = [(1 if n[0] in "aA" else float(n)) * _SECONDS[u[0].lower()] for n, u in amounts]
            return now - dt.timedelta(seconds=sum(parts))
        if text.lower() == "now":
            return now
        if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
            text = f"{now.astimezone().date()} {'0' if text[1] == ':' else ''}{text}"
        return dt.datetime.fromisoformat(text).astimezone()
    except (OverflowError, OSError):  # OSError by the system's local time
        raise ValueError(f"{text!r} is out of range") from None
    except ValueError:
        raise ValueError(
            f"{text!r} is no time: use for example '2 hours ago', '1 day 6 hours ago', 14:30, "
            "2031-05-04T14:30 (local time), 2031-05-04T12:30Z"
        ) from None


some_partitions = partial(
    option,
    "ID",
    help="Only this partition. Repeatable.",
    flags="--partition -p",
    min=0,
    max=MAX_PARTITION,
)
one_partition = partial(
    argument, "PARTITION", help="Its number, as 'discover' lists it.", min=0, max=MAX_PARTITION
)
where_to_begin = partial(
    option,
    help="Where a new consumer begins. Stored cursors come first. By default at the first event, "
    "unless the store has cursors of what looks like the same feed.",
    flags="--from",
)
of_consumer = partial(option, "NAME", help="The consumer.", envvar="FEEDAPI_NAME")
selected = partial(option, "NAME=VALUE", flags="--filter", parse=pair)
quiet = partial(flag, "No progress on stderr (shown only where it is a terminal).", "--quiet -q")
as_json = partial(flag, "Print JSON.")
without_questions = partial(flag, "Don't ask for confirmation.", "--yes -y")


def one_shot(give_up_after: float | None = None) -> RetryPolicy:
    """Return how long a command that asks a feed once waits for it, and for what it refuses."""
    seconds = ONE_SHOT if give_up_after is None else give_up_after
    return RetryPolicy(give_up_after=seconds, refused_for=5.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class Connection:
    """How a feed is reached: credentials and certificates. Proxies are those of the environment."""

    panel: ClassVar[str] = "Connection"
    environment: ClassVar[bool] = True

    auth_env: str | None = option(
        "NAME", "Environment variable with the Authorization header.", parse=secret
    )
    header_env: Pairs = option(
        "HEADER=NAME", "A header, and the environment variable with it. Repeatable.", parse=header
    )
    token_file: str | None = option("FILE", "Send the token in this file, also a new one.")
    oauth_token_url: str | None = option("URL", "Get tokens there by OAuth client credentials.")
    oauth_client_id: str | None = option("ID", "The client of --oauth-token-url.")
    oauth_secret_env: str | None = option(
        "NAME", "Environment variable with its secret.", parse=secret
    )
    oauth_scope: str | None = option("SCOPE", "The scope to ask for.")
    ca_file: str | None = option(
        "FILE", "Trust this PEM file, in place of the public ones.", flags="--ca-file --ca"
    )
    cert: str | None = option("FILE", "Show this PEM file to the publisher (mutual TLS).")
    cert_key: str | None = option("FILE", _KEY, flags="--cert-key --key")

    def __post_init__(self) -> None:
        if self.cert_key is not None and self.cert is None:
            raise ValueError("--cert-key goes with --cert")
        parts = (self.oauth_token_url, self.oauth_client_id, self.oauth_secret_env)
        if any(parts) and not all(parts):
            raise ValueError(
                "--oauth-token-url, --oauth-client-id and --oauth-secret-env go together"
            )

    @asynccontextmanager
    async def client(
        self, limits: Limits | None = None, *, anonymous: bool = False, own: bool = True
    ) -> AsyncIterator[httpx.AsyncClient | None]:
        """Open a client with these credentials, and with enough connections for `limits`.

        Gives None when there is nothing to set: the library's own client does then, unless `own` is
        False. `anonymous` leaves out everything but ``--ca-file``.
        """
        headers, auth, cert = dict[str, str](), None, None
        if not anonymous:
            headers, auth, cert = dict(self.header_env or {}), self._auth(), self.cert
            if self.auth_env:
                headers = {k: v for k, v in headers.items() if k.lower() != "authorization"}
                headers["Authorization"] = self.auth_env
        if own and not (headers or auth or cert or self.ca_file):
            yield None
            return
        import httpx

        from feedapi_client.http.environment import ByEnvironment

        limits = limits or Limits()
        size = limits.max_concurrent_fetches + 4  # for discoveries
        pool = httpx.Limits(max_connections=size, max_keepalive_connections=size)
        transport = ByEnvironment(httpx.AsyncHTTPTransport, verify=self.trust(cert), limits=pool)
        async with httpx.AsyncClient(
            transport=transport, headers=headers, timeout=limits.request_timeout, auth=auth
        ) as client:
            yield client

    def _auth(self) -> httpx.Auth | None:
        from feedapi_client.http.auth import OAuthClientCredentials, TokenFile

        if self.token_file is not None:
            return TokenFile(self.token_file)
        if not self.oauth_token_url or not self.oauth_client_id or not self.oauth_secret_env:
            return None
        id, secret, scope = self.oauth_client_id, self.oauth_secret_env, self.oauth_scope
        return OAuthClientCredentials(
            self.oauth_token_url, client_id=id, client_secret=secret, scope=scope
        )

    def trust(self, cert: str | None) -> Any:
        if self.ca_file is None and cert is None:
            return True
        from feedapi_client.http.auth import showing, trusted
        from feedapi_client.http.environment import public_certificates

        option = "--ca-file"
        try:
            context = public_certificates() if self.ca_file is None else trusted(self.ca_file)
            option = "--cert"
            if cert is not None:
                showing(context, cert, self.cert_key)
        except ValueError as error:
            raise typer.BadParameter(f"{option}: {error}") from None
        return context


@dataclass(frozen=True, kw_only=True)
class ConnectionBesideKey(Connection):
    cert_key: str | None = option("FILE", _KEY)


@dataclass(frozen=True, kw_only=True)
class Events:
    panel: ClassVar[str] = "Events"
    environment: ClassVar[bool] = True

    event_types: list[str] | None = option(
        "TYPE", "Only events of this type. Repeatable.", flags="--event-type"
    )
    skip_event_types: list[str] | None = option(
        "TYPE", "No events of this type. Repeatable.", flags="--skip-event-type"
    )
    filters: Pairs = selected(help="Only what the feed's filter selects. Repeatable.")

    def __post_init__(self) -> None:
        self.fetch()

    def fetch(self, **settings: Any) -> FetchOptions:
        only, others = self.event_types or (), self.skip_event_types or ()
        return FetchOptions(
            filters=self.filters or {}, event_types=only, skip_event_types=others, **settings
        )


@dataclass(frozen=True, kw_only=True)
class AskedFeed:
    environment: ClassVar[bool] = True

    url: str = argument("URL", "The feed. Its query is sent with every request.", parse=feed_url)
    v1_partitions: int | None = option(
        "N", "Partitions of a ZeroEventHub (v1) feed, which does not list them.", min=1, max=32768
    )
    connection: Connection


@dataclass(frozen=True, kw_only=True)
class AskedWithLineage(AskedFeed):
    panel: ClassVar[str] = "Feed"

    lineage: Pairs = option(
        "CHILD:PARENT",
        "Read CHILD after PARENT, which the feed leaves out (1:0). Repeatable.",
        parse=parse_lineage,
    )
    give_up_after: float | None = option("SECONDS", _UNREACHABLE, default=ONE_SHOT, min=0)


@dataclass(frozen=True, kw_only=True)
class FeedOptions(AskedWithLineage):
    name: str = option(
        "NAME", "The consumer that the cursors belong to.", default="default", parse=not_empty
    )
    feed_name: str | None = option(
        "NAME",
        "Keep cursors under this name of the feed, not its URL: it may move.",
        parse=lambda text: FeedKey.named(text).feed_name,
    )
    events: Events

    @asynccontextmanager
    async def access(
        self,
        limits: Limits | None = None,
        fetch: dict[str, Any] | None = None,
        retry: RetryPolicy | None = None,
    ) -> AsyncIterator[operations.FeedAccess]:
        names = ("url", "name", "feed_name", "v1_partitions")
        own = {name: getattr(self, name) for name in names}
        own |= {"fetch": self.events.fetch(**(fetch or {})), "lineage": self.lineage or {}}
        own["retry"] = retry or one_shot(self.give_up_after)
        async with self.connection.client(limits) as http:
            yield operations.FeedAccess(**own, http=http)


@dataclass(frozen=True, kw_only=True)
class Consumed(FeedOptions):
    give_up_after: float | None = option("SECONDS", _UNREACHABLE, min=0)
    monitor: str | None = option(
        "HOST:PORT",
        "Serve probes, metrics and a status page (extra monitor).",
        parse=address,
        rich_help_panel=None,
    )
    connection: ConnectionBesideKey

    @asynccontextmanager
    async def consumer(
        self,
        store: CursorStore,
        *,
        fetch: dict[str, Any] | None = None,
        retry: RetryPolicy | None = None,
        limits: Limits | None = None,
        **settings: Any,
    ) -> AsyncIterator[feedapi_client.FeedConsumer]:
        """Give the consumer, to be opened, with a monitor beside it. Settings are its arguments."""
        from feedapi_client.operations.feed_access import consumer_of

        retry = retry or RetryPolicy(give_up_after=self.give_up_after)
        async with AsyncExitStack() as stack:
            feed = await stack.enter_async_context(self.access(limits, fetch, retry))
            consumer = consumer_of(feed, store, limits=limits, **settings)
            if self.monitor is not None:
                from feedapi_client.monitor import serve

                host, _, port = self.monitor.rpartition(":")
                server = serve(consumer, host=host, port=int(port))
                try:
                    await stack.enter_async_context(server)
                except OSError as error:
                    raise CommandError(f"--monitor {self.monitor}: {error.strerror}") from None
                say(f"monitor at {server.url}")
            yield consumer


@asynccontextmanager
async def opened(
    store: AbstractAsyncContextManager[T], option: str = "--store"
) -> AsyncIterator[T]:
    async with AsyncExitStack() as stack:
        with refused(f"{option}: "):
            entered = await stack.enter_async_context(store)
        yield entered


@dataclass(frozen=True, kw_only=True)
class Store:
    panel: ClassVar[str] = "Store"
    environment: ClassVar[bool] = True

    store: str = option("STORE", STORE, default=...)

    def open(self, **settings: Any) -> AbstractAsyncContextManager[AdministrableStore]:
        from feedapi_client.operations.opening import open_store

        return opened(open_store(self.store, **settings))

    def quarantine(self) -> AbstractAsyncContextManager[QuarantineStore]:
        from feedapi_client.operations.opening import open_quarantine

        return opened(open_quarantine(self.store, create=False))


@dataclass(frozen=True, kw_only=True)
class Place(Store):
    table: str = option(
        "NAME",
        "The table, or SCHEMA.TABLE, in a database given by URL; the key prefix in Redis.",
        default="feedapi_cursors",
    )

    def open(self, **settings: Any) -> AbstractAsyncContextManager[AdministrableStore]:
        return super().open(table=self.table, **settings)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which feeds and consumers of a store are meant. What is None chooses all."""

    feed: str | None = argument(
        "FEED", "The feed: its URL or a part of it.", default=None, envvar="FEEDAPI_URL"
    )
    name: str | None = of_consumer()
    filters: Pairs = selected(help="The filter of the events that it reads. Repeatable.")

    def __post_init__(self) -> None:
        self.exact_key()

    def exact_key(self) -> FeedKey | None:
        """Return the key that a complete URL names, whether or not a store has positions of it."""
        feed, filters = self.feed or "", FetchOptions(filters=self.filters or {}).selection()
        if not feed.lower().startswith(("http://", "https://", "feed:")):
            return None
        url = feed if feed.startswith("feed:") else feed_url(feed)
        return FeedKey(url, self.name or "default", filters)

    def matches(self, key: FeedKey) -> bool:
        exact, feed, filters = self.exact_key(), self.feed or "", self.filters
        return (
            self.name in (None, key.name)
            and filters in (None, dict(key.filters))
            and (feed in key.url or (exact is not None and exact.url == key.url))
        )

    def check_found(self, found: Sequence[object]) -> None:
        if not found and (self.feed or self.name):
            raise CommandError(
                "the store holds no positions of such a feed and name: see 'feedapi cursors ls'"
            )

    async def one_feed(self, store: AdministrableStore) -> FeedKey:
        keys, exact = [key for key in await store.feeds() if self.matches(key)], self.exact_key()
        if exact in keys:
            return exact
        if len(keys) > 1:
            raise CommandError(
                f"the store holds positions of {len(keys)} feeds and names: choose by FEED and "
                f"--name: {'; '.join(map(str, keys[:10]))}"
            )
        self.check_found(keys)
        if not keys:
            raise CommandError("the store holds no positions")
        return keys[0]


def confirm(question: str, *, yes: bool, beside_json: bool) -> None:
    """Ask, unless the answer is given. Raises `typer.Abort` for no."""
    if yes:
        return
    # Within a coroutine asyncio's own handler would wait for the answer, and then cancel the task.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        typer.confirm(shown(question, MAX_LINE), abort=True, err=beside_json)
    finally:
        signal.signal(signal.SIGINT, before)
