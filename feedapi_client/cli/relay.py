"""``feedapi relay``: publish a feed to a Liftbridge stream."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_type_hints

import orjson

from feedapi_client.arguments import environment_value
from feedapi_client.cli.command import Stopping, command, flag, option, refused, stopping
from feedapi_client.cli.options import Consumed, merged, opened, pair, quiet, where_to_begin
from feedapi_client.cli.terminal import progress, say
from feedapi_client.errors import ProtocolError
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.protocol.text import counted
from feedapi_client.retry import gives_up_after

if TYPE_CHECKING:
    from feedapi_client.liftbridge import LiftbridgeApi, LiftbridgePublisher, StreamOptions
    from feedapi_client.liftbridge.oversized import OnOversized
    from feedapi_client.model import Event

_DEFAULT_NATS = "nats://127.0.0.1:4222"
_API_SECONDS, _CONNECT_SECONDS, _GRACE = 60.0, 10.0, 30.0
_MANY_EVENTS = 1000
_READ: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": {"true": True, "false": False}.__getitem__,
}


@dataclass(frozen=True, kw_only=True)
class _Nats:
    environment: ClassVar[bool] = True
    panel: ClassVar[str] = "NATS"

    nats: list[str] | None = option(
        "URL", f"A NATS server. Repeatable. By default {_DEFAULT_NATS}."
    )
    nats_env: str | None = option(
        "NAME", "Environment variable with the NATS URL, for a URL with a password."
    )
    nats_creds: str | None = option("FILE", "NATS credentials file.")

    def servers(self) -> list[str]:
        if self.nats_env:
            return [environment_value(self.nats_env, "--nats-env")]
        return self.nats or [_DEFAULT_NATS]


@dataclass(frozen=True, kw_only=True)
class _Api:
    environment: ClassVar[bool] = True
    panel: ClassVar[str] = "Liftbridge's gRPC API"

    api: list[str] | None = option(
        "HOST:PORT", "gRPC API of a broker, for --exactly-once and to check the stream. Repeatable."
    )
    api_tls: bool = flag("gRPC over TLS, with the authorities of the system.")
    api_ca: str | None = option("FILE", "gRPC over TLS, with this authority.")
    api_cert: str | None = option("FILE", "Certificate of this client; with --api-cert-key.")
    api_cert_key: str | None = option("FILE", "Its key.")
    api_token_env: str | None = option(
        "NAME", "Environment variable with a token that every call carries."
    )

    def __post_init__(self) -> None:
        if not self.api and (self.api_tls or self.api_ca or self.api_cert or self.api_token_env):
            raise ValueError("options of the gRPC API need --api HOST:PORT")
        if bool(self.api_cert) != bool(self.api_cert_key):
            raise ValueError("--api-cert and --api-cert-key go together")
        if self.api_token_env and not (self.api_tls or self.api_ca):
            raise ValueError("--api-token-env needs --api-tls or --api-ca: a token is a secret")

    def open(self, patience: float) -> LiftbridgeApi:
        """Return the connection. Raises ValueError for what is missing."""
        import grpc

        from feedapi_client.liftbridge import LiftbridgeApi
        from feedapi_client.liftbridge.ledger_url import content_of

        name, credentials = self.api_token_env, None
        if self.api_tls or self.api_ca or self.api_cert:
            files = (self.api_ca, self.api_cert_key, self.api_cert)
            credentials = grpc.ssl_channel_credentials(*map(content_of, files))
        return LiftbridgeApi(
            self.api or (),
            timeout=max(1.0, min(_API_SECONDS, patience)),
            credentials=credentials,
            token=None if name is None else environment_value(name, "--api-token-env"),
        )


@dataclass(frozen=True, kw_only=True)
class _Stream:
    environment: ClassVar[bool] = True
    panel: ClassVar[str] = "The stream"

    stream: str = option("NAME", "The stream to publish to.", default=...)
    subject: str = option(
        "SUBJECT", "The NATS subject of the stream. By default its name.", default=""
    )
    partitions: int | None = option(
        "N", "Its number of partitions. By default 1, with --api what the broker says.", min=1
    )
    key: str | None = option(
        "FIELD", "The key of a message: a field of the payload; dots lead into nested objects."
    )
    ack: Literal["leader", "all"] = option(
        help="Wait for the leader, or for all in-sync replicas.", default="all"
    )
    ack_timeout: float = option("SECONDS", "Deadline for each ack.", default=10.0)
    max_in_flight: int = option(
        "N", "Maximum number of messages that wait for their ack.", default=8192, min=1
    )
    max_message_bytes: int = option(
        "N", "The broker's clustering.replication.max.bytes.", default=1024 * 1024, min=1
    )
    oversized: Literal["stop", "skip", "quarantine"] = option(
        help="What becomes of an event that is too large for a message.", default="stop"
    )
    quarantine: str | None = option(
        "STORE", "Keep quarantined events in this file or database, not in that of --store."
    )


@dataclass(frozen=True, kw_only=True)
class _Cursors:
    environment: ClassVar[bool] = True
    panel: ClassVar[str] = "Cursors"

    exactly_once: Literal["batch", "events"] | None = option(
        help="Keep the cursors in the stream: a message for each batch, or for each event."
    )
    max_batch_bytes: int = option(
        "N", "Size of a batch, where the feed's checkpoints allow it.", default=512 * 1024, min=1
    )
    store: str | None = option(
        "STORE",
        "Keep the cursors here, at least once: an SQLite file, a database URL, or env:NAME.",
    )
    start: Literal["first", "last"] | None = where_to_begin()


@dataclass(frozen=True, kw_only=True)
class _NewStream:
    environment: ClassVar[bool] = True
    panel: ClassVar[str] = "A new stream"

    create: bool = flag("Create the stream if it is missing.")
    replicas: int = option("N", "Number of replicas.", default=1, min=1)
    min_isr: int | None = option("N", "Minimum number of in-sync replicas.", min=1)
    options: list[dict] | None = option(  # type: ignore[type-arg]
        "NAME=VALUE",
        "What a new stream does with its messages, as retention_bytes=1000000 or compact=true: a "
        "field of StreamOptions. Repeatable.",
        flags="--stream-option",
        parse=pair,
    )

    def __post_init__(self) -> None:
        merged(self.options, "--stream-option")

    def read(self) -> StreamOptions:
        """Return the options. Raises ValueError."""
        from feedapi_client.liftbridge import StreamOptions

        kinds, values = get_type_hints(StreamOptions), {}
        for name, text in merged(self.options, "--stream-option").items():
            if name not in kinds:
                known = ", ".join(kinds)
                raise ValueError(f"--stream-option: there is no {name}; there are: {known}")
            kind = next(iter(get_args(kinds[name])), str).__name__
            try:
                values[name] = _READ.get(kind, str)(text)
            except (ValueError, KeyError):
                raise ValueError(f"--stream-option: {name} takes {kind}, not {text!r}") from None
        return StreamOptions(**values)


@dataclass(frozen=True, kw_only=True)
class _Relay:
    environment: ClassVar[bool] = True

    feed: Consumed
    to: _Stream
    cursors: _Cursors
    nats: _Nats
    api: _Api
    new: _NewStream
    follow: bool = flag("Go on at the end of the feed, until Ctrl-C.", "--follow -f")
    quiet: bool = quiet()

    def __post_init__(self) -> None:
        self.feed.connection.trust(self.feed.connection.cert)  # before the broker is asked
        exactly_once, aside = self.cursors.exactly_once, self.to.quarantine
        if self.new.create and not self.api.api:
            raise ValueError("--create needs --api HOST:PORT")
        if exactly_once and not self.api.api:
            raise ValueError("--exactly-once reads the stream back: it needs --api HOST:PORT")
        if bool(exactly_once) is bool(self.cursors.store):
            raise ValueError(
                "say where the cursors are kept: --store FILE, or --exactly-once, which keeps them "
                "in the stream and goes without --store"
            )
        if aside and self.to.oversized != "quarantine":
            raise ValueError("--quarantine goes with --oversized quarantine")
        if exactly_once and self.to.oversized == "quarantine" and not aside:
            raise ValueError(
                "--exactly-once has no store for quarantined events: say where, --quarantine FILE"
            )

    def new_stream(self) -> StreamOptions:
        """Return how a new stream is made. Raises ValueError."""
        options = self.new.read()
        if self.cursors.exactly_once:
            if options.compact:
                raise ValueError("--exactly-once needs every message: it goes without compact")
            if options.retention_seconds:
                raise ValueError(
                    "--exactly-once keeps its cursors in the stream, where a relay that is stopped "
                    "for longer than retention_seconds would lose them: use retention_messages or "
                    "retention_bytes"
                )
            options.check_ledger()
        return options


@command(
    "relay https://service/myfeed --stream orders --store relay.db --key order.id --follow",
    "relay https://service/myfeed --stream orders --api broker:9292 --create "
    "--exactly-once batch --follow",
    "relay https://service/myfeed --stream orders --store relay.db --oversized quarantine",
)
async def relay(o: _Relay) -> int:
    """Publish a feed's events to a Liftbridge stream, and commit cursors when they are acked.

    At least once with --store, exactly once with --exactly-once. Ends at the end of the feed, or
    goes on with --follow until Ctrl-C, which ends it after the batches in flight. A feed or a
    broker that is away is waited for. Needs the extra liftbridge.
    """
    log = logging.getLogger("feedapi_client.runtime.handlers")
    log.setLevel(logging.CRITICAL)  # the error that ends the relay is told in one line
    try:
        with refused():
            async with stopping(_GRACE) as stop:
                await _publish(o, stop)
    finally:
        log.setLevel(logging.NOTSET)
    return stop.exit_code


async def _publish(o: _Relay, stop: Stopping) -> None:
    """Relay until the end, a signal or an error."""
    from feedapi_client.liftbridge import (
        AckPolicy,
        LiftbridgePublisher,
        Relay,
        Stream,
        StreamCursorStore,
    )
    from feedapi_client.operations.opening import open_store

    to, exactly_once = o.to, o.cursors.exactly_once
    new, key = o.new_stream(), None if to.key is None else _Key(to.key)
    patience = gives_up_after(RetryPolicy(give_up_after=o.feed.give_up_after))
    stream = Stream(to.stream, to.subject, to.partitions or 1)
    api = o.api.open(patience) if o.api.api else None
    async with AsyncExitStack() as stack:
        oversized = await _oversized(to, stack)
        creds = o.nats.nats_creds
        publisher: LiftbridgePublisher = await stack.enter_async_context(
            LiftbridgePublisher(
                o.nats.servers(),
                ack_timeout=to.ack_timeout,
                max_in_flight=to.max_in_flight,
                max_message_bytes=to.max_message_bytes,
                connect_timeout=max(patience, _CONNECT_SECONDS),
                options={"user_credentials": creds} if creds else None,
            )
        )
        if api is not None:
            await stack.enter_async_context(api)
            if o.new.create:
                await api.create_stream(
                    stream,
                    concurrency_control=bool(exactly_once),
                    replication_factor=o.new.replicas,
                    min_isr=o.new.min_isr,
                    options=new,
                )
            if to.partitions is None:
                found = (await api.metadata(stream.name)).stream
                stream = Stream(stream.name, stream.subject, found.partitions)
        store: Any
        if exactly_once and api is not None:
            store = StreamCursorStore(publisher, api, stream, format=exactly_once)
        else:
            opening = opened(open_store(o.cursors.store or "", create=True))
            store = await stack.enter_async_context(opening)
        limits = Limits(max_batch_bytes=o.cursors.max_batch_bytes)
        consumer = await stack.enter_async_context(
            o.feed.consumer(store, start=o.cursors.start, follow=o.follow, limits=limits)
        )
        stop.consumer = await stack.enter_async_context(consumer)
        work = Relay(
            consumer,
            publisher,
            stream,
            key=key,
            ack_policy=AckPolicy[to.ack.upper()],
            on_oversized=oversized,
            api=api,
        )
        async with progress(lambda: (consumer, work.progress.events), quiet=o.quiet):
            await work.run()
        if key is not None:
            key.warn()
        if not o.quiet:
            say(_summary(work, to.stream))


async def _oversized(o: _Stream, stack: AsyncExitStack) -> OnOversized:
    """Return what the relay takes as `on_oversized`; a quarantine is opened."""
    from feedapi_client.operations.opening import open_quarantine

    if o.oversized == "quarantine" and o.quarantine is not None:
        store = opened(open_quarantine(o.quarantine), "--quarantine")
        return await stack.enter_async_context(store)
    return "raise" if o.oversized == "stop" else o.oversized


def _summary(relay: Any, stream: str) -> str:
    done = relay.progress
    batches = counted(done.batches, "batch", "batches")
    text = f"{counted(done.events, 'event')} in {batches} to stream {stream}, "
    text += counted(done.retries, "retry", "retries")
    if done.put_aside:
        text += f", {done.put_aside} too large and put aside"
    if done.recovered:
        text += f", {done.recovered} published again because the broker lost them"
    return text


class _Key:
    """The key of a message by ``--key``. Says so when no event has that field: it may be a typo."""

    def __init__(self, path: str) -> None:
        self._path = path.split(".")
        self._events = 0
        self._found = False

    def __call__(self, event: Event) -> bytes | None:
        try:
            key = self._of(event)
        except ValueError:
            text = "--key: an event is no valid JSON"
            raise ProtocolError(text, partition=event.partition) from None
        self._found = self._found or bool(key)
        self._events += 1
        if self._events == _MANY_EVENTS:  # a relay that follows the feed has no end
            self.warn()
        return key or None

    def _of(self, event: Event) -> bytes:
        """Return a field: text as it is, other values as JSON, nothing for no field."""
        value: Any = event.json()
        for name in self._path:
            value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            return b""
        if isinstance(value, str):
            return value.encode(errors="replace")
        try:
            return orjson.dumps(value)
        except TypeError:  # an integer of more than 64 bits
            return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    def warn(self) -> None:
        """Warn when there were events, and none had the field. Does so once."""
        if self._events and not self._found:
            self._found = True
            say(
                f"warning: of {counted(self._events, 'event')} none has the field "
                f"{'.'.join(self._path)} of --key: their messages have no key"
            )
