"""``feedapi cat``: print the events of a feed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from feedapi_client.cli.feed_options import (
    ONE_SHOT,
    ConnectionBesideKey,
    EventOptions,
    FeedName,
    Follow,
    GiveUpAfter,
    Lineage,
    Monitor,
    Quiet,
    Url,
    V1Partitions,
    checked_url,
)
from feedapi_client.cli.signature import REMOVED
from feedapi_client.cli.store_options import ConsumerName, checked_name

if TYPE_CHECKING:
    from feedapi_client.cli.cat_format import LineFormat, TemplateFormat
    from feedapi_client.options import FetchOptions

_FIRST_OR_LAST = re.compile(r"_?(first|last)")


@dataclass(frozen=True, kw_only=True)
class Cat:
    """Options of ``feedapi cat``."""

    url: Url
    follow: Follow = False
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="first|last|CURSOR",
            help="Where to begin; a cursor needs one --partition. Stored cursors come first.",
        ),
    ] = None
    partitions: Annotated[
        list[int] | None,
        typer.Option(
            "--partition",
            "-p",
            min=0,
            max=32767,
            metavar="ID",
            help="Read only this partition, without waiting for its parents. Repeatable.",
        ),
    ] = None
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            envvar="FEEDAPI_STORE",
            metavar="STORE",
            help=(
                "Keep cursors in this SQLite file (or database URL, or env:NAME), "
                "and go on from there next time."
            ),
        ),
    ] = None
    name: ConsumerName = "default"
    feed_name: FeedName = None
    raw: Annotated[
        bool, typer.Option("--raw", help="Print payloads alone, byte for byte as they were sent.")
    ] = False
    template: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="TEMPLATE",
            help=(
                r"Print each event by a template, such as '%p %c %s\n': %p partition, %s payload, "
                "%S its bytes, %h headers, %c cursor behind it, %i number."
            ),
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=1,
            metavar="N",
            help=(
                "End after N events; with --store at the first cursor behind them, so that the "
                "next "
                "run goes on there."
            ),
        ),
    ] = None
    events: EventOptions
    v1_partitions: V1Partitions = None
    v1_headers: Annotated[
        list[str] | None,
        typer.Option(
            "--v1-header", metavar="NAME", help="Event headers to ask a v1 feed for; _all for all."
        ),
    ] = None
    page_size_hint: Annotated[
        int | None,
        typer.Option("--page-size-hint", min=1, metavar="N", help="Events per response."),
    ] = None
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Hold responses open, where the feed offers that; with --follow."
        ),
    ] = False
    unordered: Annotated[
        bool,
        typer.Option(
            "--unordered", help="Read all partitions at once, without waiting for their parents."
        ),
    ] = False
    lineage: Lineage = None
    give_up_after: GiveUpAfter = None
    monitor: Monitor = None
    quiet: Quiet = False
    connection: ConnectionBesideKey

    def fetch(self) -> FetchOptions:
        """Return how the feed is asked. Raises `typer.BadParameter`."""
        limit = self.limit if self.store and not self.stream else None
        return self.events.fetch(
            # So that a cursor comes where the limit is.
            page_size_hint=self.page_size_hint or limit,
            stream=self.stream,
            v1_headers=self.v1_headers,
        )

    def lines(self) -> LineFormat | TemplateFormat:
        """Return how events are printed. Raises `typer.BadParameter`."""
        from feedapi_client.cli.cat_format import LineFormat, TemplateFormat

        if self.template is None:
            return LineFormat(raw=self.raw)
        return TemplateFormat(self.template)

    def patience(self) -> float | None:
        """Return the `RetryPolicy.give_up_after` of the consumer."""
        return ONE_SHOT if self.give_up_after is None and not self.follow else self.give_up_after

    def check(self) -> None:
        """Raise `typer.BadParameter` for options that don't go together."""
        if self.raw and self.template is not None:
            raise typer.BadParameter("--format can't be combined with --raw")
        checked_url(self.url)
        self.connection.check()
        checked_name(self.name)
        if (self.feed_name or self.name != "default") and self.store is None:
            raise typer.BadParameter("--name and --feed-name need --store")


async def cat(options: Cat) -> int:
    """Print a feed's events, one line of JSON each: {"partition":2,"data":…}.

    Ends at the end of the feed, or goes on with --follow until Ctrl-C. With --store the cursors
    are committed, each after the events before it were written and flushed. Events that were not
    written because the reader closed the pipe come again next time. Ctrl-C ends it after the batch
    in flight.
    """
    from feedapi_client.cli import cat_printer

    options.check()
    return await cat_printer.print_events(options)


def start_of(
    start: str | None, partitions: list[int] | None
) -> Literal["first", "last"] | dict[int, str] | None:
    """Return the `start` of the consumer for ``--from``. Raises `typer.BadParameter`."""
    if not start:
        return None
    if (special := _FIRST_OR_LAST.fullmatch(start)) is not None:
        return "last" if special[1] == "last" else "first"
    if partitions is None or len(partitions) != 1:
        raise typer.BadParameter(
            "--from CURSOR needs one --partition: a cursor belongs to one partition. "
            f"--from TIME is gone: {REMOVED['cat --from TIME']}"
        )
    if not start.isascii() or not start.isprintable():
        raise typer.BadParameter("--from: a cursor is printable ASCII")
    return {partitions[0]: start}
