"""The options of commands that work on stored cursors, leases and events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from feedapi_client.cli.feed_options import (
    ONE_SHOT,
    Connection,
    EventOptions,
    FeedName,
    GiveUpAfter,
    Lineage,
    Url,
    V1Partitions,
    checked_url,
    edges,
    finite,
    pairs,
)
from feedapi_client.cli.reporting import CommandError
from feedapi_client.model import FeedKey
from feedapi_client.options import FetchOptions, RetryPolicy

if TYPE_CHECKING:
    from feedapi_client.operations import FeedAccess
    from feedapi_client.stores.base import AdministrableStore
    from feedapi_client.stores.journal import Journal

TABLE = "feedapi_cursors"
_NAMED = "feed:"
_SHOWN = 10

Store = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="FEEDAPI_STORE",
        metavar="STORE",
        help=(
            "An SQLite file, a database URL (postgresql+psycopg://…), redis://…, "
            "liftbridge://HOST:PORT/STREAM of an exactly-once relay, or env:NAME for one in an "
            "environment variable."
        ),
    ),
]
Table = Annotated[
    str,
    typer.Option(
        "--table",
        metavar="NAME",
        help="The table, or SCHEMA.TABLE, in a database given by URL; the key prefix in Redis.",
    ),
]
Filters = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="NAME=VALUE",
        help="Only events that the feed's filter selects. Repeatable.",
    ),
]
Partition = Annotated[int, typer.Argument(min=0, max=32767, metavar="PARTITION")]
ConsumerName = Annotated[
    str, typer.Option("--name", metavar="NAME", help="The consumer that the cursors belong to.")
]
JournalDays = Annotated[
    float | None,
    typer.Option(
        "--journal",
        callback=finite,
        metavar="DAYS",
        help="Keep a history of the cursors for 'feedapi cursors rewind', for so many days.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")]
BesideInstances = Annotated[
    bool, typer.Option("--force", help="Although instances that share the feed are alive.")
]


def checked_name(name: str) -> str:
    """Return the name of a consumer. Raises `typer.BadParameter` for an empty one."""
    if not name:
        raise typer.BadParameter("--name must not be empty")
    return name


def journal_of(days: float | None) -> Journal | None:
    """Return the history that ``--journal`` asks for. Raises `typer.BadParameter`."""
    from feedapi_client.stores.journal import Journal

    try:
        return None if days is None else Journal(keep=timedelta(days=days))
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"--journal {days:g}: give a number of days") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """A store of cursors."""

    store: Store
    table: Table = TABLE

    @asynccontextmanager
    async def open(
        self, *, create: bool = False, journal: Journal | None = None
    ) -> AsyncIterator[AdministrableStore]:
        """Open the store; see `feedapi_client.cli.databases.open_store`."""
        from feedapi_client.cli.databases import open_store

        async with open_store(
            self.store, create=create, table=self.table, journal=journal
        ) as store:
            yield store


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which feeds and consumers of a store are meant. What is None chooses all."""

    feed: Annotated[
        str | None,
        typer.Option(
            "--feed",
            metavar="URL",
            help="The feed, or a part of its URL; needed when the store holds several.",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="The consumer; needed when the store holds several."
        ),
    ] = None

    def matches(self, key: FeedKey, filters: list[str] | None = None) -> bool:
        """Whether the key is chosen."""
        if self.name is not None and key.name != self.name:
            return False
        if filters is not None and key.filters != _selection(filters):
            return False
        return self.feed is None or self.feed in key.url or _key_url(self.feed) == key.url

    def exact_key(self, filters: list[str] | None = None) -> FeedKey | None:
        """Return the key that a complete URL names, whether or not a store has positions of it.

        Raises `typer.BadParameter` for a URL that no feed can have.
        """
        if self.feed is None or not _is_url(self.feed):
            return None
        named = self.feed.startswith(_NAMED)
        url = self.feed if named else checked_url(self.feed, "--feed")
        return FeedKey(url, self.name or "default", _selection(filters))

    async def one_feed(
        self, store: AdministrableStore, filters: list[str] | None = None
    ) -> FeedKey:
        """Return the only chosen key, or the one that is given exactly.

        Raises `CommandError` when there is none, or more than one.
        """
        keys = [key for key in await store.feeds() if self.matches(key, filters)]
        exact = self.exact_key(filters)
        if exact is not None and exact in keys:
            return exact
        if len(keys) == 1:
            return keys[0]
        if not keys and (self.feed or self.name):
            raise no_such_positions()
        if not keys:
            raise CommandError("the store holds no positions")
        raise CommandError(
            f"the store holds positions of {len(keys)} feeds and names: "
            f"choose with --feed and --name: {'; '.join(map(str, keys[:_SHOWN]))}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOfFeed:
    """A feed that is asked, and the consumer whose cursors are meant."""

    url: Url
    place: StorePlace
    name: ConsumerName = "default"
    feed_name: FeedName = None
    events: EventOptions
    v1_partitions: V1Partitions = None
    lineage: Lineage = None
    give_up_after: GiveUpAfter = ONE_SHOT
    connection: Connection

    @asynccontextmanager
    async def open(
        self, *, create: bool = False
    ) -> AsyncIterator[tuple[AdministrableStore, FeedAccess]]:
        """Open the store and the way to the feed. Raises `typer.BadParameter`."""
        from feedapi_client.operations import FeedAccess

        access = FeedAccess(
            url=checked_url(self.url),
            name=checked_name(self.name),
            feed_name=self.feed_name,
            fetch=self.events.fetch(),
            retry=RetryPolicy(give_up_after=self.give_up_after),
            v1_partitions=self.v1_partitions,
            lineage=edges(self.lineage),
        )
        self.connection.check()
        async with self.place.open(create=create) as store, self.connection.client() as http:
            yield store, replace(access, http=http)


def no_such_positions() -> CommandError:
    """Return the error of a choice for which nothing is stored."""
    return CommandError(
        "the store holds no positions of such a feed and name: see 'feedapi cursors ls'"
    )


def _selection(filters: list[str] | None) -> tuple[tuple[str, str], ...]:
    selected = FetchOptions(filters=pairs(filters, "--filter")).selection()
    return tuple(sorted(selected.items()))


def _is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://")) or text.startswith(_NAMED)


def _key_url(text: str) -> str | None:
    try:
        return FeedKey(text).url if _is_url(text) else None
    except ValueError:
        return None
