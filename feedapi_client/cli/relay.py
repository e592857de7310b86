"""``feedapi relay``: publish a feed to a Liftbridge stream."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from feedapi_client.cli.command import USAGE, CommandError, command, option
from feedapi_client.cli.options import Consumed
from feedapi_client.cli.run import StartFrom

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

    environment: ClassVar[bool] = True
    panel: ClassVar[str] = "NATS"

    nats: list[str] | None = option(
        "URL", "A NATS server. Repeatable. By default nats://127.0.0.1:4222."
    )
    nats_env: str | None = option(
        "NAME", "Environment variable with the NATS URL, for a URL with a password."
    )
    nats_creds: str | None = option("FILE", "NATS credentials file.")


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """How the gRPC API of a broker is reached."""

    environment: ClassVar[bool] = True
    panel: ClassVar[str] = "Liftbridge's gRPC API"

    api: list[str] | None = option(
        "HOST:PORT", "gRPC API of a broker, for --exactly-once and to check the stream. Repeatable."
    )
    api_tls: bool = option(help="gRPC over TLS, with the authorities of the system.", default=False)
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


@dataclass(frozen=True, kw_only=True)
class NewStreamOptions:
    """The stream that ``--create`` makes: the fields of `StreamOptions`."""

    environment: ClassVar[bool] = True
    panel: ClassVar[str] = _NEW

    group: str = option("NAME", "NATS queue group of the stream.", default="")
    retention_bytes: int | None = option("N", "Keep so many bytes of a partition.")
    retention_messages: int | None = option("N", "Keep so many messages of a partition.")
    retention_seconds: float | None = option(
        "SECONDS", "Keep messages so long; not with --exactly-once."
    )
    cleaner_seconds: float | None = option("SECONDS", "Interval of cleaning up.")
    segment_bytes: int | None = option("N", "Size of a segment.")
    segment_seconds: float | None = option("SECONDS", "Age of a segment.")
    compact: bool | None = option(
        help="Keep the newest message of each key only; not with --exactly-once.",
        flags="--compact/--no-compact",
    )
    compact_goroutines: int | None = option("N", "Goroutines that compact a partition at once.")
    auto_pause_seconds: float | None = option("SECONDS", "Pause an idle partition. 0: never.")
    auto_pause_unless_subscribed: bool | None = option(
        help="Do not pause while somebody is subscribed.",
        flags="--auto-pause-unless-subscribed/--auto-pause-always",
    )
    encryption: bool | None = option(
        help="Encrypt values on the broker.", flags="--encryption/--no-encryption"
    )

    def options(self) -> StreamOptions:
        """Return them as the API takes them. Raises ValueError."""
        from feedapi_client.liftbridge import StreamOptions

        return StreamOptions(**{each.name: getattr(self, each.name) for each in fields(self)})


@dataclass(frozen=True, kw_only=True)
class RelayToStream:
    """Options of ``feedapi relay``."""

    environment: ClassVar[bool] = True

    feed: Consumed
    stream: str = option("NAME", "The stream to publish to.", default=..., rich_help_panel=_STREAM)
    subject: str = option(
        "SUBJECT",
        "The NATS subject of the stream. By default its name.",
        default="",
        rich_help_panel=_STREAM,
    )
    partitions: int | None = option(
        "N",
        "Number of partitions of the stream. By default 1, with --api what the broker says.",
        min=1,
        rich_help_panel=_STREAM,
    )
    key: str | None = option(
        "FIELD",
        "The key of a message: a field of the payload; dots lead into nested objects.",
        rich_help_panel=_STREAM,
    )
    ack: AckFrom = option(
        help="Wait for the leader, or for all in-sync replicas.",
        default=AckFrom.ALL,
        rich_help_panel=_STREAM,
    )
    ack_timeout: float = option(
        "SECONDS", "Deadline for each ack.", default=10.0, rich_help_panel=_STREAM
    )
    max_in_flight: int = option(
        "N",
        "Maximum number of messages that wait for their ack.",
        default=8192,
        min=1,
        rich_help_panel=_STREAM,
    )
    max_message_bytes: int = option(
        "N",
        "The largest message of the broker: its clustering.replication.max.bytes.",
        default=1024 * 1024,
        min=1,
        rich_help_panel=_STREAM,
    )
    oversized: OnOversizedEvent = option(
        help="What becomes of an event that is too large for a message.",
        default=OnOversizedEvent.STOP,
        rich_help_panel=_STREAM,
    )
    quarantine: str | None = option(
        "STORE",
        "SQLite file or database URL for quarantined events. By default the one of --store.",
        rich_help_panel=_STREAM,
    )
    exactly_once: MessageContent | None = option(
        help="Keep the cursors in the stream: a message for each batch, or for each event.",
        rich_help_panel=_CURSORS,
    )
    max_batch_bytes: int = option(
        "N",
        "Size of a batch, where the feed's checkpoints allow it.",
        default=512 * 1024,
        min=1,
        rich_help_panel=_CURSORS,
    )
    store: str | None = option(
        "STORE",
        "Keep the cursors here, at least once: an SQLite file, a database URL, or env:NAME.",
        rich_help_panel=_CURSORS,
    )
    start: StartFrom | None = option(
        help="Where a new name begins. By default at the first event, unless the store has cursors "
        "of what looks like the same feed.",
        flags="--from",
        rich_help_panel=_CURSORS,
    )
    nats: NatsOptions
    api: ApiOptions
    create: bool = option(
        help="Create the stream if it is missing.", default=False, rich_help_panel=_NEW
    )
    replicas: int = option("N", "Number of replicas.", default=1, min=1, rich_help_panel=_NEW)
    min_isr: int | None = option(
        "N", "Minimum number of in-sync replicas.", min=1, rich_help_panel=_NEW
    )
    new_stream: NewStreamOptions
    follow: bool = option(
        help="Go on at the end of the feed, until Ctrl-C.", default=False, flags="--follow -f"
    )
    quiet: bool = option(
        help="No progress on stderr (shown only where stderr is a terminal).",
        default=False,
        flags="--quiet -q",
    )

    def __post_init__(self) -> None:
        self.feed.connection.trust(self.feed.connection.cert)  # before the broker is asked
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


@command(
    "relay https://service/myfeed --stream orders --store relay.db --key order.id --follow",
    "relay https://service/myfeed --stream orders --api broker:9292 --create "
    "--exactly-once batch --follow",
    "relay https://service/myfeed --stream orders --store relay.db --oversized quarantine",
)
async def relay(o: RelayToStream) -> int:
    """Publish a feed's events to a Liftbridge stream, and commit cursors when they are acked.

    At least once with --store, exactly once with --exactly-once. Ends at the end of the feed, or
    goes on with --follow until Ctrl-C, which ends it after the batches in flight. A feed or a
    broker that is away is waited for. Needs the extra liftbridge.
    """
    from feedapi_client.cli.relay_run import RelayRun, without_handler_logs

    try:
        with without_handler_logs():
            return await RelayRun(o).run()
    except ValueError as error:
        raise CommandError(str(error), USAGE) from None
