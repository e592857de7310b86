"""``feedapi relay``: publish a feed to a Liftbridge stream."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import orjson

from feedapi_client.arguments import environment_value
from feedapi_client.cli import options
from feedapi_client.cli.command import Pairs, Stopping, command, flag, option, refused, stopping
from feedapi_client.cli.options import opened
from feedapi_client.cli.terminal import progress, say
from feedapi_client.errors import ProtocolError
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.protocol.text import counted
from feedapi_client.retry import gives_up_after

if TYPE_CHECKING:
    from feedapi_client.liftbridge import LiftbridgeApi, StreamOptions
    from feedapi_client.model import Event

_DEFAULT_NATS = "nats://127.0.0.1:4222"
_stream = partial(option, rich_help_panel="The stream")
_cursors = partial(option, rich_help_panel="Cursors")
_nats = partial(option, rich_help_panel="NATS")
_api = partial(option, rich_help_panel="Liftbridge's gRPC API")
_new = partial(option, rich_help_panel="A new stream")


@dataclass(frozen=True, kw_only=True)
class _Relay:
    environment: ClassVar[bool] = True

    feed: options.Consumed
    stream: str = _stream("NAME", "The stream to publish to.", default=...)
    subject: str = _stream(
        "SUBJECT", "The NATS subject of the stream. By default its name.", default=""
    )
    partitions: int | None = _stream(
        "N", "Its number of partitions. By default 1, with --api what the broker says.", min=1
    )
    key: str | None = _stream(
        "FIELD", "The key of a message: a field of the payload; dots lead into nested objects."
    )
    ack: Literal["leader", "all"] = _stream(
        help="Wait for the leader, or for all in-sync replicas.", default="all"
    )
    ack_timeout: float = _stream("SECONDS", "Deadline for each ack.", default=10.0)
    max_in_flight: int = _stream(
        "N", "Maximum number of messages that wait for their ack.", default=8192, min=1
    )
    max_message_bytes: int = _stream(
        "N", "The broker's clustering.replication.max.bytes.", default=1024 * 1024, min=1
    )
    oversized: Literal["stop", "skip", "quarantine"] = _stream(
        help="What becomes of an event that is too large for a message.", default="stop"
    )
    quarantine: str | None = _stream(
        "STORE", "Keep quarantined events in this file or database, not in that of --store."
    )
    exactly_once: Literal["batch", "events"] | None = _cursors(
        help="Keep the cursors in the stream: a message for each batch, or for each event."
    )
    max_batch_bytes: int = _cursors(
        "N", "Size of a batch, where the feed's checkpoints allow it.", default=512 * 1024, min=1
    )
    store: str | None = _cursors(
        "STORE",
        "Keep the cursors here, at least once: an SQLite file, a database URL, or env:NAME.",
    )
    start: Literal["first", "last"] | None = options.where_to_begin(rich_help_panel="Cursors")
    nats: list[str] | None = _nats("URL", f"A NATS server. Repeatable. By default {_DEFAULT_NATS}.")
    nats_env: str | None = _nats(
        "NAME", "Environment variable with the NATS URL, for a URL with a password."
    )
    nats_creds: str | None = _nats("FILE", "NATS credentials file.")
    api: list[str] | None = _api(
        "HOST:PORT", "gRPC API of a broker, for --exactly-once and to check the stream. Repeatable."
    )
    api_tls: bool = _api(help="gRPC over TLS, with the authorities of the system.", default=False)
    api_ca: str | None = _api("FILE", "gRPC over TLS, with this authority.")
    api_cert: str | None = _api("FILE", "Certificate of this client; with --api-cert-key.")
    api_cert_key: str | None = _api("FILE", "Its key.")
    api_token_env: str | None = _api(
        "NAME", "Environment variable with a token that every call carries."
    )
    create: bool = _new(help="Create the stream if it is missing.", default=False)
    replicas: int = _new("N", "Number of replicas.", default=1, min=1)
    min_isr: int | None = _new("N", "Minimum number of in-sync replicas.", min=1)
    stream_option: Pairs = _new(
        "NAME=VALUE",
        "What a new stream does with its messages, as retention_bytes=1000000 or compact=true: a "
        "field of StreamOptions. Repeatable.",
        parse=options.pair,
    )
    follow: bool = flag("Go on at the end of the feed, until Ctrl-C.", "--follow -f")
    quiet: bool = options.quiet()

    def __post_init__(self) -> None:
        self.feed.connection.trust(self.feed.connection.cert)  # before the broker is asked
        tls, exactly_once = self.api_tls or self.api_ca, self.exactly_once
        if not self.api and (tls or self.api_cert or self.api_token_env):
            raise ValueError("options of the gRPC API need --api HOST:PORT")
        if bool(self.api_cert) != bool(self.api_cert_key):
            raise ValueError("--api-cert and --api-cert-key go together")
        if self.api_token_env and not tls:
            raise ValueError("--api-token-env needs --api-tls or --api-ca: a token is a secret")
        if self.create and not self.api:
            raise ValueError("--create needs --api HOST:PORT")
        if exactly_once and not self.api:
            raise ValueError("--exactly-once reads the stream back: it needs --api HOST:PORT")
        if bool(exactly_once) is bool(self.store):
            raise ValueError(
                "say where the cursors are kept: --store FILE, or --exactly-once, which keeps them "
                "in the stream and goes without --store"
            )
        if self.quarantine and self.oversized != "quarantine":
            raise ValueError("--quarantine goes with --oversized quarantine")
        if exactly_once and self.oversized == "quarantine" and not self.quarantine:
            raise ValueError(
                "--exactly-once has no store for quarantined events: say where, --quarantine FILE"
            )

    def new_stream(self) -> StreamOptions:
        from feedapi_client.liftbridge import StreamOptions

        given, known = self.stream_option or {}, [field.name for field in fields(StreamOptions)]
        if unknown := sorted(given.keys() - set(known)):
            there = ", ".join(known)
            raise ValueError(f"--stream-option: there is no {unknown[0]}; there are: {there}")
        try:
            made = msgspec.convert(given, StreamOptions, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"--stream-option: {error}") from None
        if self.exactly_once:
            made.for_ledger()
        return made

    def connect(self, patience: float) -> LiftbridgeApi | None:
        if not self.api:
            return None
        import grpc

        from feedapi_client.liftbridge import LiftbridgeApi
        from feedapi_client.liftbridge.ledger_url import content_of

        name, credentials = self.api_token_env, None
        if self.api_tls or self.api_ca or self.api_cert:
            files = (self.api_ca, self.api_cert_key, self.api_cert)
            credentials = grpc.ssl_channel_credentials(*map(content_of, files))
        token = None if name is None else environment_value(name, "--api-token-env")
        timeout = max(1.0, min(60.0, patience))
        return LiftbridgeApi(self.api, timeout=timeout, credentials=credentials, token=token)


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
            async with stopping(30.0) as stop, AsyncExitStack() as stack:
                await _publish(o, stop, stack)
    finally:
        log.setLevel(logging.NOTSET)
    return stop.exit_code


async def _publish(o: _Relay, stop: Stopping, stack: AsyncExitStack) -> None:
    from feedapi_client.liftbridge import (
        AckPolicy,
        LiftbridgePublisher,
        Relay,
        Stream,
        StreamCursorStore,
    )
    from feedapi_client.operations.opening import open_quarantine

    enter: Any = stack.enter_async_context
    new, key = o.new_stream(), None if o.key is None else partial(_key, o.key)
    patience = gives_up_after(RetryPolicy(give_up_after=o.feed.give_up_after))
    stream = Stream(o.stream, o.subject, o.partitions or 1)
    servers = o.nats or [_DEFAULT_NATS]
    if o.nats_env:
        servers = [environment_value(o.nats_env, "--nats-env")]
    api, on_oversized = o.connect(patience), "raise" if o.oversized == "stop" else o.oversized
    if o.quarantine is not None:
        on_oversized = await enter(opened(open_quarantine(o.quarantine), "--quarantine"))
    publisher = await enter(
        LiftbridgePublisher(
            servers,
            ack_timeout=o.ack_timeout,
            max_in_flight=o.max_in_flight,
            max_message_bytes=o.max_message_bytes,
            connect_timeout=max(patience, 10.0),
            options={"user_credentials": o.nats_creds} if o.nats_creds else None,
        )
    )
    if api is not None:
        await enter(api)
        if o.create:
            await api.create_stream(
                stream,
                concurrency_control=bool(o.exactly_once),
                replication_factor=o.replicas,
                min_isr=o.min_isr,
                options=new,
            )
        if o.partitions is None:
            found = (await api.metadata(stream.name)).stream
            stream = Stream(stream.name, stream.subject, found.partitions)
    if o.exactly_once and api is not None:
        store: Any = StreamCursorStore(publisher, api, stream, format=o.exactly_once)
    else:
        store = await enter(options.Store(store=o.store or "").open(create=True))
    limits = Limits(max_batch_bytes=o.max_batch_bytes)
    settings: Any = {"start": o.start, "follow": o.follow, "limits": limits}
    consumer = await enter(await enter(o.feed.consumer(store, **settings)))
    stop.consumer = consumer
    work = Relay(
        consumer,
        publisher,
        stream,
        key=key,
        ack_policy=AckPolicy[o.ack.upper()],
        on_oversized=on_oversized,
        api=api,
    )
    async with progress(lambda: (consumer, work.progress.events), quiet=o.quiet):
        await work.run()
    if not o.quiet:
        say(_summary(work.progress, o.stream))


def _summary(done: Any, stream: str) -> str:
    batches = counted(done.batches, "batch", "batches")
    text = f"{counted(done.events, 'event')} in {batches} to stream {stream}, "
    text += counted(done.retries, "retry", "retries")
    return text + (f", {done.put_aside} too large and put aside" if done.put_aside else "")


def _key(path: str, event: Event) -> bytes | None:
    """Return a text as it is, other values as JSON."""
    try:
        value = event.json()
    except ValueError:
        text = "--key: an event is no valid JSON"
        raise ProtocolError(text, partition=event.partition) from None
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value.encode(errors="replace") or None
    return None if value is None else orjson.dumps(value)
