"""``feedapi relay``: publish a feed to a Liftbridge stream."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from feedapi_client.cli.feed_options import (
    ConnectionBesideKey,
    EventOptions,
    FeedName,
    Follow,
    GiveUpAfter,
    Lineage,
    Monitor,
    Quiet,
    StartFrom,
    Url,
    V1Partitions,
    checked_url,
    edges,
)
from feedapi_client.cli.reporting import CommandError

if TYPE_CHECKING:
    from feedapi_client.liftbridge import StreamOptions

_STREAM = "The stream"
_CURSORS = "Cursors"
_NEW = "A new stream"


class AckFrom(StrEnum):
    """Whose ack a relay waits for."""

    LEADER = "leader"
    ALL = "all"


class MessageContent(StrEnum):
    """What a message of an exactly-once relay holds."""

    BATCH = "batch"
    EVENTS = "events"


class OnOversizedEvent(StrEnum):
    """What becomes of an event that is too large for a message."""

    STOP = "stop"
    SKIP = "skip"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, kw_only=True)
class NatsOptions:
    """How NATS is reached."""

    panel: ClassVar[str] = "NATS"

    nats: Annotated[
        list[str] | None,
        typer.Option(
            "--nats",
            metavar="URL",
            help="A NATS server. Repeatable. By default nats://127.0.0.1:4222.",
        ),
    ] = None
    nats_env: Annotated[
        str | None,
        typer.Option(
            "--nats-env",
            metavar="NAME",
            help="Environment variable with the NATS URL, for a URL with a password.",
        ),
    ] = None
    nats_creds: Annotated[
        str | None, typer.Option("--nats-creds", metavar="FILE", help="NATS credentials file.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """How the gRPC API of a broker is reached."""

    panel: ClassVar[str] = "Liftbridge's gRPC API"

    api: Annotated[
        list[str] | None,
        typer.Option(
            "--api",
            metavar="HOST:PORT",
            help="gRPC API of a broker, for --exactly-once and to check the stream. Repeatable.",
        ),
    ] = None
    api_tls: Annotated[
        bool, typer.Option("--api-tls", help="gRPC over TLS, with the authorities of the system.")
    ] = False
    api_ca: Annotated[
        str | None,
        typer.Option("--api-ca", metavar="FILE", help="gRPC over TLS, with this authority."),
    ] = None
    api_cert: Annotated[
        str | None,
        typer.Option(
            "--api-cert", metavar="FILE", help="Certificate of this client; with --api-cert-key."
        ),
    ] = None
    api_cert_key: Annotated[
        str | None, typer.Option("--api-cert-key", metavar="FILE", help="Its key.")
    ] = None
    api_token_env: Annotated[
        str | None,
        typer.Option(
            "--api-token-env",
            metavar="NAME",
            help="Environment variable with a token that every call carries.",
        ),
    ] = None

    def check(self) -> None:
        """Raise ValueError for options that do not fit together."""
        if not self.api and (self.api_tls or self.api_ca or self.api_cert or self.api_token_env):
            raise ValueError("options of the gRPC API need --api HOST:PORT")
        if bool(self.api_cert) != bool(self.api_cert_key):
            raise ValueError("--api-cert and --api-cert-key go together")
        if self.api_token_env and not (self.api_tls or self.api_ca):
            raise ValueError("--api-token-env needs --api-tls or --api-ca: a token is a secret")


@dataclass(frozen=True, kw_only=True)
class NewStreamOptions:
    """The stream that ``--create`` makes: the fields of `StreamOptions`."""

    panel: ClassVar[str] = _NEW

    group: Annotated[
        str, typer.Option("--group", metavar="NAME", help="NATS queue group of the stream.")
    ] = ""
    retention_bytes: Annotated[
        int | None,
        typer.Option("--retention-bytes", metavar="N", help="Keep so many bytes of a partition."),
    ] = None
    retention_messages: Annotated[
        int | None,
        typer.Option(
            "--retention-messages", metavar="N", help="Keep so many messages of a partition."
        ),
    ] = None
    retention_seconds: Annotated[
        float | None,
        typer.Option(
            "--retention-seconds",
            metavar="SECONDS",
            help="Keep messages so long; not with --exactly-once.",
        ),
    ] = None
    cleaner_seconds: Annotated[
        float | None,
        typer.Option("--cleaner-seconds", metavar="SECONDS", help="Interval of cleaning up."),
    ] = None
    segment_bytes: Annotated[
        int | None, typer.Option("--segment-bytes", metavar="N", help="Size of a segment.")
    ] = None
    segment_seconds: Annotated[
        float | None, typer.Option("--segment-seconds", metavar="SECONDS", help="Age of a segment.")
    ] = None
    compact: Annotated[
        bool | None,
        typer.Option(
            "--compact/--no-compact",
            help="Keep the newest message of each key only; not with --exactly-once.",
        ),
    ] = None
    compact_goroutines: Annotated[
        int | None,
        typer.Option(
            "--compact-goroutines", metavar="N", help="Goroutines that compact a partition at once."
        ),
    ] = None
    auto_pause_seconds: Annotated[
        float | None,
        typer.Option(
            "--auto-pause-seconds", metavar="SECONDS", help="Pause an idle partition. 0: never."
        ),
    ] = None
    auto_pause_unless_subscribed: Annotated[
        bool | None,
        typer.Option(
            "--auto-pause-unless-subscribed/--auto-pause-always",
            help="Do not pause while somebody is subscribed.",
        ),
    ] = None
    encryption: Annotated[
        bool | None,
        typer.Option("--encryption/--no-encryption", help="Encrypt values on the broker."),
    ] = None

    def options(self) -> StreamOptions:
        """Return them as the API takes them. Raises ValueError."""
        from feedapi_client.liftbridge import StreamOptions

        return StreamOptions(**{each.name: getattr(self, each.name) for each in fields(self)})


@dataclass(frozen=True, kw_only=True)
class RelayToStream:
    """Options of ``feedapi relay``."""

    url: Url
    stream: Annotated[
        str,
        typer.Option(
            "--stream", metavar="NAME", rich_help_panel=_STREAM, help="The stream to publish to."
        ),
    ]
    subject: Annotated[
        str,
        typer.Option(
            "--subject",
            metavar="SUBJECT",
            rich_help_panel=_STREAM,
            help="The NATS subject of the stream. By default its name.",
        ),
    ] = ""
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions",
            min=1,
            metavar="N",
            rich_help_panel=_STREAM,
            help=(
                "Number of partitions of the stream. By default 1, with --api what the broker says."
            ),
        ),
    ] = None
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="FIELD",
            rich_help_panel=_STREAM,
            help="The key of a message: a field of the payload; dots lead into nested objects.",
        ),
    ] = None
    ack: Annotated[
        AckFrom,
        typer.Option(
            "--ack",
            rich_help_panel=_STREAM,
            help="Wait for the leader, or for all in-sync replicas.",
        ),
    ] = AckFrom.ALL
    ack_timeout: Annotated[
        float,
        typer.Option(
            "--ack-timeout",
            metavar="SECONDS",
            rich_help_panel=_STREAM,
            help="Deadline for each ack.",
        ),
    ] = 10.0
    max_in_flight: Annotated[
        int,
        typer.Option(
            "--max-in-flight",
            min=1,
            metavar="N",
            rich_help_panel=_STREAM,
            help="Maximum number of messages that wait for their ack.",
        ),
    ] = 8192
    max_message_bytes: Annotated[
        int,
        typer.Option(
            "--max-message-bytes",
            min=1,
            metavar="N",
            rich_help_panel=_STREAM,
            help="The largest message of the broker: its clustering.replication.max.bytes.",
        ),
    ] = 1024 * 1024
    oversized: Annotated[
        OnOversizedEvent,
        typer.Option(
            "--oversized",
            rich_help_panel=_STREAM,
            help="What becomes of an event that is too large for a message.",
        ),
    ] = OnOversizedEvent.STOP
    quarantine: Annotated[
        str | None,
        typer.Option(
            "--quarantine",
            metavar="STORE",
            rich_help_panel=_STREAM,
            help=(
                "SQLite file or database URL for quarantined events. By default the one of --store."
            ),
        ),
    ] = None
    exactly_once: Annotated[
        MessageContent | None,
        typer.Option(
            "--exactly-once",
            rich_help_panel=_CURSORS,
            help="Keep the cursors in the stream: a message for each batch, or for each event.",
        ),
    ] = None
    max_batch_bytes: Annotated[
        int,
        typer.Option(
            "--max-batch-bytes",
            min=1,
            metavar="N",
            rich_help_panel=_CURSORS,
            help="Size of a batch, where the feed's checkpoints allow it.",
        ),
    ] = 512 * 1024
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="STORE",
            rich_help_panel=_CURSORS,
            help=(
                "Keep the cursors here, at least once: an SQLite file, a database URL, or env:NAME."
            ),
        ),
    ] = None
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="NAME",
            rich_help_panel=_CURSORS,
            help="The consumer that the cursors belong to.",
        ),
    ] = "default"
    start: Annotated[
        StartFrom | None,
        typer.Option(
            "--from",
            rich_help_panel=_CURSORS,
            help=(
                "Where a new name begins. By default at the first event, unless the store has "
                "cursors of what looks like the same feed."
            ),
        ),
    ] = None
    nats: NatsOptions
    api: ApiOptions
    create: Annotated[
        bool,
        typer.Option("--create", rich_help_panel=_NEW, help="Create the stream if it is missing."),
    ] = False
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas", min=1, metavar="N", rich_help_panel=_NEW, help="Number of replicas."
        ),
    ] = 1
    min_isr: Annotated[
        int | None,
        typer.Option(
            "--min-isr",
            min=1,
            metavar="N",
            rich_help_panel=_NEW,
            help="Minimum number of in-sync replicas.",
        ),
    ] = None
    new_stream: NewStreamOptions
    follow: Follow = False
    feed_name: FeedName = None
    events: EventOptions
    v1_partitions: V1Partitions = None
    lineage: Lineage = None
    give_up_after: GiveUpAfter = None
    monitor: Monitor = None
    quiet: Quiet = False
    connection: ConnectionBesideKey

    def check(self) -> None:
        """Raise ValueError for options that do not fit together."""
        self.api.check()
        if not self.name:
            raise ValueError("--name must not be empty")
        if self.create and not self.api.api:
            raise ValueError("--create needs --api HOST:PORT")
        if not self.exactly_once and not self.store:
            raise ValueError(
                "say where the cursors are kept: --store FILE, or --exactly-once for in the stream"
            )
        if self.exactly_once:
            self._check_exactly_once()
        if self.quarantine and self.oversized is not OnOversizedEvent.QUARANTINE:
            raise ValueError("--quarantine goes with --oversized quarantine")

    def _check_exactly_once(self) -> None:
        if not self.api.api:
            raise ValueError("--exactly-once reads the stream back: it needs --api HOST:PORT")
        if self.store:
            raise ValueError(
                "--exactly-once keeps the cursors in the stream: it goes without --store"
            )
        if self.new_stream.compact:
            raise ValueError("--exactly-once needs every message: it goes without --compact")
        if self.new_stream.retention_seconds:
            raise ValueError(
                "--exactly-once keeps its cursors in the stream, where a relay that is stopped for "
                "longer than --retention-seconds would lose them: use --retention-messages or "
                "--retention-bytes"
            )
        self.new_stream.options().check_ledger()
        if self.oversized is OnOversizedEvent.QUARANTINE and not self.quarantine:
            raise ValueError(
                "--exactly-once has no store for quarantined events: say where, --quarantine FILE"
            )


async def relay(options: RelayToStream) -> int:
    """Publish a feed's events to a Liftbridge stream, and commit cursors when they are acked.

    At least once with --store, exactly once with --exactly-once. Ends at the end of the feed, or
    goes on with --follow until Ctrl-C, which ends it after the batches in flight. A feed or a
    broker that is away is waited for. Needs the extra liftbridge.
    """
    try:
        from feedapi_client.cli.relay_run import run_relay
    except ImportError as missing:
        raise CommandError(str(missing)) from None
    try:
        checked_url(options.url)
        options.check()
        options.events.fetch()
        edges(options.lineage)
        options.connection.check()
        return await run_relay(options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
