"""``feedapi run``: consume a feed with the application's handler."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from feedapi_client.cli.command import command, option
from feedapi_client.cli.options import Consumed, Store

if TYPE_CHECKING:
    from feedapi_client.quarantine import Retry
    from feedapi_client.stores.journal import Journal


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


class StartFrom(StrEnum):
    """Where a new name begins."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of ``feedapi run``."""

    environment: ClassVar[bool] = True

    feed: Consumed
    handler: str = option(
        "MODULE:FUNCTION",
        "The application's 'async def handle(batch)', or with --key 'async def handle(event)', "
        "searched in this directory too; or a function without parameters that returns an "
        "asynchronous context manager which gives the handler.",
        default=...,
    )
    place: Store
    on_failure: OnFailure = option(
        help="When the handler raises: end with exit code 3; or call it again, --attempts times; "
        "or then put the failing event into quarantine.",
        default=OnFailure.RAISE,
    )
    attempts: int = option(
        "N",
        "Calls of a handler that fails, with --on-failure retry or quarantine; 0: no limit.",
        default=5,
        min=0,
    )
    share: bool = option(
        help="Divide the partitions with other processes of this store and name, on any machine.",
        default=False,
    )
    grace: float = option(
        "SECONDS",
        "Time to finish and commit what is in flight after SIGTERM and SIGINT.",
        default=25.0,
        min=0,
    )
    max_concurrency: int | None = option(
        "N", "Partitions that are handled at once, by default 32.", min=1
    )
    key: str | None = option(
        "JSON_POINTER",
        "Handle event by event: those of one key in order, different keys at once. Where in the "
        "payload the key is, such as /order/id.",
    )
    concurrency: int | None = option(
        "N", "With --key: events that are handled at once, by default 32.", min=1
    )
    start: StartFrom | None = option(
        help="Where a new consumer begins. Stored cursors come first. By default at the first "
        "event, unless the store has cursors of what looks like the same feed.",
        flags="--from",
    )
    follow: bool = option(
        help="Go on at the end of the feed, or end there with exit code 0.",
        default=True,
        flags="--follow/--no-follow",
    )
    park: bool = option(
        help="Go on with the others when the feed can't continue one partition.", default=False
    )
    journal: float | None = option(
        "DAYS",
        "Keep a history of the cursors for 'feedapi cursors rewind', for so many days.",
    )
    log_format: LogFormat = option(
        help="Log records on stderr: text, or JSON, one a line.", default=LogFormat.TEXT
    )

    def __post_init__(self) -> None:
        connection = self.feed.connection
        certified = connection.cert is not None and connection.cert_key is None
        if certified and self.key is not None and Path(self.key).is_file():
            # --cert and --key, as curl and other commands have them: no member of a payload.
            connection = replace(connection, cert_key=self.key)
            object.__setattr__(self, "feed", replace(self.feed, connection=connection))
            object.__setattr__(self, "key", None)
        self.history()
        by_key = self.key_path() is not None
        if self.concurrency is not None and not by_key:
            raise ValueError("--concurrency goes with --key; partitions: --max-concurrency")
        if self.max_concurrency is not None and by_key:
            raise ValueError("with --key, --concurrency is how many events at once")

    def key_path(self) -> list[str] | None:
        """Return the names and numbers that lead to an event's key; None without ``--key``."""
        if self.key is None:
            return None
        head, *parts = self.key.split("/")
        if head or not parts or _BAD_ESCAPE.search(self.key):
            raise ValueError(
                "--key takes a JSON pointer, which begins with a slash: /order/id. A slash in a "
                "name is ~1, and a tilde ~0. (The key of --cert is --cert-key.)"
            )
        return [part.replace("~1", "/").replace("~0", "~") for part in parts]

    def history(self) -> Journal | None:
        """Return the journal of the store."""
        from feedapi_client.stores.journal import Journal

        try:
            return None if self.journal is None else Journal(keep=timedelta(days=self.journal))
        except (ValueError, OverflowError):
            raise ValueError(f"--journal {self.journal:g}: give a number of days") from None

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


@command(
    "run https://service/myfeed --handler shop.orders:handle --store cursors.db",
    "run https://service/myfeed --handler shop.orders:handle --store env:DATABASE_URL --share",
    "run https://service/myfeed --handler shop.orders:handle --store c.db --monitor 0.0.0.0:9464",
    "run https://service/myfeed --handler shop.orders:each --store c.db --key /id --concurrency 99",
    "run https://service/myfeed --handler shop.orders:handle --store cursors.db --journal 7",
)
async def run(o: RunOptions) -> int:
    """Consume a feed with the application's handler: the library without a main program.

    SIGTERM and Ctrl-C end it after what is in flight, a second signal cancels that, a third ends
    at once. Exit codes: 3 when the handler failed, 4 when another consumer of this name has taken
    over, 130 and 143 when what was in flight was cancelled after --grace; see feedapi --help.
    """
    from feedapi_client.cli.handler_runner import Runner, log_to_stderr

    log_to_stderr(o.log_format)
    return await Runner(o).run()
