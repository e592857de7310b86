"""One run of ``feedapi relay``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import grpc
import orjson

from feedapi_client.arguments import environment_value
from feedapi_client.cli.command import SIGNALLED, stopping
from feedapi_client.cli.options import opened
from feedapi_client.cli.relay import ApiOptions, RelayToStream
from feedapi_client.cli.terminal import progress, say
from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import ProtocolError
from feedapi_client.liftbridge import (
    AckPolicy,
    LiftbridgeApi,
    LiftbridgePublisher,
    Relay,
    Stream,
    StreamCursorStore,
)
from feedapi_client.liftbridge.ledger_url import content_of
from feedapi_client.liftbridge.oversized import OnOversized
from feedapi_client.model import Event
from feedapi_client.operations.opening import open_quarantine, open_store
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.retry import gives_up_after
from feedapi_client.stores.base import CursorStore

_DEFAULT_NATS = "nats://127.0.0.1:4222"
_API_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
_GRACE = 30.0
_MANY_EVENTS = 1000


class RelayRun:
    """One run of the command."""

    def __init__(self, options: RelayToStream) -> None:
        self.options = options
        self._new_stream = options.new_stream.options()
        nats, api = options.nats, options.api
        self._servers = (
            [environment_value(nats.nats_env, "--nats-env")] if nats.nats_env else nats.nats
        )
        self._token = (
            environment_value(api.api_token_env, "--api-token-env") if api.api_token_env else None
        )
        self._limits = Limits(max_batch_bytes=options.max_batch_bytes)
        self._retry = RetryPolicy(give_up_after=options.feed.give_up_after)
        self._entry_patience = gives_up_after(self._retry)
        self._key = None if options.key is None else _Key(options.key)

    async def run(self) -> int:
        """Relay until the end, a signal or an error, and return the exit code."""
        o = self.options
        async with AsyncExitStack() as stack:
            stop = await stack.enter_async_context(stopping(_GRACE))
            oversized = await self._oversized(stack)
            publisher = await stack.enter_async_context(self._publisher())
            api, stream = await self._api(stack)
            store = await self._store(stack, publisher, api, stream)
            consuming = o.feed.consumer(
                store,
                start=None if o.start is None else o.start.value,
                follow=o.follow,
                limits=self._limits,
            )
            consumer = await stack.enter_async_context(consuming)
            stop.consumer = await stack.enter_async_context(consumer)
            relay = Relay(
                consumer,
                publisher,
                stream,
                key=self._key,
                ack_policy=AckPolicy[o.ack.value.upper()],
                on_oversized=oversized,
                api=api,
            )
            await self._relay(relay, consumer)
        return SIGNALLED + stop.number if stop.number else 0

    def _publisher(self) -> LiftbridgePublisher:
        options, nats = self.options, self.options.nats
        return LiftbridgePublisher(
            self._servers or [_DEFAULT_NATS],
            ack_timeout=options.ack_timeout,
            max_in_flight=options.max_in_flight,
            max_message_bytes=options.max_message_bytes,
            connect_timeout=max(self._entry_patience, _CONNECT_SECONDS),
            options={"user_credentials": nats.nats_creds} if nats.nats_creds else None,
        )

    async def _api(self, stack: AsyncExitStack) -> tuple[LiftbridgeApi | None, Stream]:
        """Open the gRPC API where it is given, and create the stream if that is asked for."""
        options = self.options
        stream = Stream(options.stream, options.subject, options.partitions or 1)
        if not options.api.api:
            return None, stream
        api = await stack.enter_async_context(
            _connection(options.api, self._token, self._entry_patience)
        )
        if options.create:
            await api.create_stream(
                stream,
                concurrency_control=bool(options.exactly_once),
                replication_factor=options.replicas,
                min_isr=options.min_isr,
                options=self._new_stream,
            )
        if options.partitions is None:
            found = (await api.metadata(stream.name)).stream
            stream = Stream(stream.name, stream.subject, found.partitions)
        return api, stream

    async def _store(
        self,
        stack: AsyncExitStack,
        publisher: LiftbridgePublisher,
        api: LiftbridgeApi | None,
        stream: Stream,
    ) -> CursorStore:
        options = self.options
        if not options.exactly_once or api is None:
            store = open_store(options.store or "", create=True)
            return await stack.enter_async_context(opened(store))
        return StreamCursorStore(publisher, api, stream, format=options.exactly_once.value)

    async def _oversized(self, stack: AsyncExitStack) -> OnOversized:
        match self.options.oversized:
            case "skip":
                return "skip"
            case "quarantine":
                where = self.options.quarantine
                if where is None:
                    return "quarantine"
                return await stack.enter_async_context(opened(open_quarantine(where)))
        return "raise"

    async def _relay(self, relay: Relay, consumer: FeedConsumer) -> None:
        async with progress(lambda: (consumer, relay.progress.events), quiet=self.options.quiet):
            await relay.run()
        if self._key is not None:
            self._key.warn()
        if not self.options.quiet:
            say(_summary(relay, self.options.stream))


def _summary(relay: Relay, stream: str) -> str:
    done = relay.progress
    text = f"{done.events:,} events in {done.batches:,} batches to stream {stream}, "
    text += f"{done.retries} retries"
    if done.put_aside:
        text += f", {done.put_aside} too large and put aside"
    if done.recovered:
        text += f", {done.recovered} published again because the broker lost them"
    return text


@contextmanager
def without_handler_logs() -> Iterator[None]:
    """Leave out the record of the error that ends the relay: the command tells it in one line."""
    log = logging.getLogger("feedapi_client.runtime.handlers")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _connection(options: ApiOptions, token: str | None, give_up_after: float) -> LiftbridgeApi:
    """Return the connection to the API. Raises ValueError for what is missing."""
    credentials = None
    if options.api_tls or options.api_ca or options.api_cert:
        files = (options.api_ca, options.api_cert_key, options.api_cert)
        credentials = grpc.ssl_channel_credentials(*(content_of(file) for file in files))
    seconds = max(1.0, min(_API_SECONDS, give_up_after))
    return LiftbridgeApi(options.api or (), timeout=seconds, credentials=credentials, token=token)


def _key_of(event: Event, path: Sequence[str]) -> bytes:
    """Return a field of a payload: text as it is, other values as JSON, nothing for no field."""
    value: Any = event.json()
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode(errors="replace")
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class _Key:
    """The key of a message by ``--key``. Says so when no event has that field: it may be a typo."""

    def __init__(self, path: str) -> None:
        self._path = path.split(".")
        self._events = 0
        self._found = False

    def __call__(self, event: Event) -> bytes | None:
        try:
            key = _key_of(event, self._path)
        except ValueError:
            text = "--key: an event is no valid JSON"
            raise ProtocolError(text, partition=event.partition) from None
        self._found = self._found or bool(key)
        self._events += 1
        if self._events == _MANY_EVENTS:  # a relay that follows the feed has no end
            self.warn()
        return key or None

    def warn(self) -> None:
        """Warn when there were events, and none had the field. Does so once."""
        if self._events and not self._found:
            self._found = True
            say(
                f"warning: of {self._events:,} events none has the field {'.'.join(self._path)} of "
                "--key: their messages have no key"
            )
