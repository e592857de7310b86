"""``feedapi run``: consume a feed with the application's handler."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from feedapi_client.cli.feed_options import (
    ConnectionBesideKey,
    EventOptions,
    FeedName,
    Lineage,
    Monitor,
    StartFrom,
    Url,
    V1Partitions,
    checked_url,
    edges,
    finite,
)
from feedapi_client.cli.store_options import JournalDays, checked_name, journal_of

if TYPE_CHECKING:
    from feedapi_client.quarantine import Retry


_BAD_ESCAPE = re.compile(r"~(?![01])")
AT_ONCE = 32
"""How many batches or events are handled at once, unless the options say."""


class OnFailure(StrEnum):
    """What becomes of a batch whose handler raises."""

    RAISE = "raise"
    RETRY = "retry"
    QUARANTINE = "quarantine"


class LogFormat(StrEnum):
    """How log records are written."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of ``feedapi run``."""

    url: Url
    handler: Annotated[
        str,
        typer.Option(
            "--handler",
            metavar="MODULE:FUNCTION",
            help=(
                "The application's 'async def handle(batch)', or with --key 'async def "
                "handle(event)', searched in this directory too; or a function without parameters "
                "that returns an asynchronous context manager which gives the handler."
            ),
        ),
    ]
    store: Annotated[
        str,
        typer.Option(
            "--store",
            envvar="FEEDAPI_STORE",
            metavar="STORE",
            help=(
                "Where cursors are kept: an SQLite file, a database URL, redis://…, or env:NAME "
                "for "
                "one in an environment variable."
            ),
        ),
    ]
    name: Annotated[
        str,
        typer.Option("--name", envvar="FEEDAPI_NAME", metavar="NAME", help="The consumer's name."),
    ] = "default"
    feed_name: FeedName = None
    on_failure: Annotated[
        OnFailure,
        typer.Option(
            "--on-failure",
            help=(
                "When the handler raises: end with exit code 3; or call it again, --attempts "
                "times; "
                "or then put the failing event into quarantine."
            ),
        ),
    ] = OnFailure.RAISE
    attempts: Annotated[
        int,
        typer.Option(
            "--attempts",
            min=0,
            metavar="N",
            help=(
                "Calls of a handler that fails, with --on-failure retry or quarantine; 0: no limit."
            ),
        ),
    ] = 5
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help=(
                "Divide the partitions with other processes of this store and name, on any machine."
            ),
        ),
    ] = False
    monitor: Monitor = None
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            min=0,
            callback=finite,
            metavar="SECONDS",
            help="Time to finish and commit what is in flight after SIGTERM and SIGINT.",
        ),
    ] = 25.0
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency",
            min=1,
            metavar="N",
            help="Partitions that are handled at once, by default 32.",
        ),
    ] = None
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="JSON_POINTER",
            help=(
                "Handle event by event: those of one key in order, different keys at once. Where "
                "in the payload the key is, such as /order/id."
            ),
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            min=1,
            metavar="N",
            help="With --key: events that are handled at once, by default 32.",
        ),
    ] = None
    start: Annotated[
        StartFrom | None,
        typer.Option(
            "--start",
            help=(
                "Where a new consumer begins. Stored cursors come first. By default at the first "
                "event, unless the store has cursors of what looks like the same feed."
            ),
        ),
    ] = None
    follow: Annotated[
        bool,
        typer.Option(
            "--follow/--no-follow",
            help="Go on at the end of the feed, or end there with exit code 0.",
        ),
    ] = True
    park: Annotated[
        bool,
        typer.Option(
            "--park", help="Go on with the others when the feed can't continue one partition."
        ),
    ] = False
    journal: JournalDays = None
    log_format: Annotated[
        LogFormat,
        typer.Option("--log-format", help="Log records on stderr: text, or JSON, one a line."),
    ] = LogFormat.TEXT
    events: EventOptions
    v1_partitions: V1Partitions = None
    lineage: Lineage = None
    connection: ConnectionBesideKey

    def __post_init__(self) -> None:
        connection = self.connection
        certified = connection.cert is not None and connection.cert_key is None
        if certified and self.key is not None and Path(self.key).is_file():
            # --cert and --key, as curl and other commands have them: no member of a payload.
            object.__setattr__(self, "connection", replace(connection, cert_key=self.key))
            object.__setattr__(self, "key", None)

    def key_path(self) -> list[str] | None:
        """Return the names and numbers that lead to an event's key; None without ``--key``."""
        if self.key is None:
            return None
        head, *parts = self.key.split("/")
        if head or not parts or _BAD_ESCAPE.search(self.key):
            raise typer.BadParameter(
                "--key takes a JSON pointer, which begins with a slash: /order/id. A slash in a "
                "name is ~1, and a tilde ~0. (The key of --cert is --cert-key.)"
            )
        return [part.replace("~1", "/").replace("~0", "~") for part in parts]

    def policy(self) -> Literal["raise"] | Retry:
        """Return what `FeedConsumer.run` takes as ``on_failure``."""
        from feedapi_client.quarantine import Quarantine, Retry

        attempts = self.attempts or None
        match self.on_failure:
            case OnFailure.RETRY:
                return Retry(attempts=attempts)
            case OnFailure.QUARANTINE:
                return Retry(attempts=attempts, then=Quarantine())
        return "raise"

    def check(self) -> None:
        """Raise `typer.BadParameter` for options that can't be used."""
        checked_url(self.url)
        self.events.fetch()
        edges(self.lineage)
        journal_of(self.journal)
        self.connection.check()
        by_key = self.key_path() is not None
        if self.concurrency is not None and not by_key:
            raise typer.BadParameter("--concurrency goes with --key; partitions: --max-concurrency")
        if self.max_concurrency is not None and by_key:
            raise typer.BadParameter("with --key, --concurrency is how many events at once")


async def run(options: RunOptions) -> int:
    """Consume a feed with the application's handler: the library without a main program.

    SIGTERM and Ctrl-C end it after what is in flight, a second signal cancels that, a third ends
    at once.
    """
    from feedapi_client.cli.handler_runner import Runner, log_to_stderr

    checked_name(options.name)
    options.check()
    log_to_stderr(options.log_format)
    return await Runner(options).run()
