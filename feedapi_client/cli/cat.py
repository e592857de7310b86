"""``feedapi cat``: print the events of a feed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from feedapi_client.cli.command import REMOVED, SIGNALLED, Stopping, command, option, stopping
from feedapi_client.cli.options import ONE_SHOT, Consumed, opened
from feedapi_client.cli.terminal import Output, OutputClosedError, progress, say
from feedapi_client.options import Limits, RetryPolicy

if TYPE_CHECKING:
    from feedapi_client.cli.cat_format import LineFormat, TemplateFormat
    from feedapi_client.consumer import FeedConsumer
    from feedapi_client.model import Batch, Event
    from feedapi_client.stores.base import CursorStore

_FIRST_OR_LAST = re.compile(r"_?(first|last)")


@dataclass(frozen=True, kw_only=True)
class Cat:
    """Options of ``feedapi cat``."""

    feed: Consumed
    follow: bool = option(
        help="Go on at the end of the feed, until Ctrl-C.", default=False, flags="--follow -f"
    )
    start: str | None = option(
        "first|last|CURSOR",
        "Where to begin; a cursor needs one --partition. Stored cursors come first.",
        flags="--from",
    )
    partitions: list[int] | None = option(
        "ID",
        "Read only this partition, without waiting for its parents. Repeatable.",
        flags="--partition -p",
        min=0,
        max=32767,
    )
    store: str | None = option(
        "STORE",
        "Keep cursors in this SQLite file (or database URL, or env:NAME), and go on from there "
        "next time.",
        envvar="FEEDAPI_STORE",
    )
    raw: bool = option(help="Print payloads alone, byte for byte as they were sent.", default=False)
    template: str | None = option(
        "TEMPLATE",
        r"Print each event by a template, such as '%p %c %s\n': %p partition, %s payload, %S its "
        "bytes, %h headers, %c cursor behind it, %i number.",
        flags="--format",
    )
    limit: int | None = option(
        "N",
        "End after N events; with --store at the first cursor behind them, so that the next run "
        "goes on there.",
        flags="--limit -n",
        min=1,
    )
    v1_headers: list[str] | None = option(
        "NAME", "Event headers to ask a v1 feed for; _all for all.", flags="--v1-header"
    )
    page_size_hint: int | None = option("N", "Events per response.", min=1)
    stream: bool = option(
        help="Hold responses open, where the feed offers that; with --follow.", default=False
    )
    unordered: bool = option(
        help="Read all partitions at once, without waiting for their parents.", default=False
    )
    quiet: bool = option(
        help="No progress on stderr (shown only where stderr is a terminal).",
        default=False,
        flags="--quiet -q",
    )

    def __post_init__(self) -> None:
        if self.raw and self.template is not None:
            raise ValueError("--format can't be combined with --raw")
        names = {"FEEDAPI_NAME": self.feed.name, "FEEDAPI_FEED_NAME": self.feed.feed_name}
        given = {value for key, value in names.items() if value != os.environ.get(key)}
        if self.store is None and given - {None, "default"}:
            raise ValueError("--name and --feed-name need --store")
        self.feed.events.fetch(**self.fetch())
        self.lines()
        self.begin()

    def fetch(self) -> dict[str, Any]:
        """Return what `FetchOptions` takes beside the selection of events."""
        limit = self.limit if self.store and not self.stream else None
        return {
            "page_size_hint": self.page_size_hint or limit,  # a cursor comes where the limit is
            "stream": self.stream,
            "v1_headers": self.v1_headers or (),
        }

    def lines(self) -> LineFormat | TemplateFormat:
        """Return how events are printed."""
        from feedapi_client.cli.cat_format import LineFormat, TemplateFormat

        if self.template is None:
            return LineFormat(raw=self.raw)
        return TemplateFormat(self.template)

    def begin(self) -> Literal["first", "last"] | dict[int, str] | None:
        """Return the `start` of the consumer."""
        if not self.start:
            return None
        if (special := _FIRST_OR_LAST.fullmatch(self.start)) is not None:
            return "last" if special[1] == "last" else "first"
        if self.partitions is None or len(self.partitions) != 1:
            raise ValueError(
                "--from CURSOR needs one --partition: a cursor belongs to one partition. "
                f"--from TIME is gone: {REMOVED['cat --from TIME']}"
            )
        if not self.start.isascii() or not self.start.isprintable():
            raise ValueError("--from: a cursor is printable ASCII")
        return {self.partitions[0]: self.start}


@command(
    "cat https://service/myfeed --limit 10",
    "cat https://service/myfeed --follow --from last --raw",
    "cat https://service/myfeed --store cursors.db --name report",
    r"cat https://service/myfeed --format '%p %c %s\n'",
    "cat https://service/myfeed --partition 3 --from CURSOR --ca-file company.pem --auth-env TOKEN",
)
async def cat(o: Cat) -> int:
    """Print a feed's events, one line of JSON each: {"partition":2,"data":…}.

    Ends at the end of the feed, or goes on with --follow until Ctrl-C. With --store the cursors
    are committed, each after the events before it were written and flushed. Events that were not
    written because the reader closed the pipe come again next time. Ctrl-C ends it after the batch
    in flight.
    """
    import anyio

    output = Output()
    async with stopping() as stop:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(output.watch_reader)
                await EventPrinter(o, output).run(stop)
                tasks.cancel_scope.cancel()
        except* OutputClosedError:  # a reader that has all it wants is a regular end
            pass
    return SIGNALLED + stop.number if stop.number else 0


class EventPrinter:
    """Prints the events of one feed to stdout."""

    def __init__(self, o: Cat, output: Output) -> None:
        self.o = o
        self._output = output
        self._lines = o.lines()
        self._remaining = o.limit
        self._printed = 0

    async def run(self, stop: Stopping) -> None:
        """Print until the end of the feed, the limit or a signal.

        A batch is committed after all its events were written and flushed.
        """
        o = self.o
        # With a limit each checkpoint is a batch of its own, so that the run ends at the first one.
        limits = Limits() if o.limit is None else Limits(max_batch_bytes=1)
        give_up_after = o.feed.give_up_after
        if give_up_after is None and not o.follow:
            give_up_after = ONE_SHOT
        async with (
            self._store() as store,
            o.feed.consumer(
                store,
                fetch=o.fetch(),
                start=o.begin(),
                ordered=not o.unordered,
                follow=o.follow,
                partitions=o.partitions or None,
                retry=RetryPolicy(give_up_after=give_up_after),
                limits=limits,
            ) as consumer,
        ):
            await self._note_stored_cursors(consumer)
            async with consumer:
                stop.consumer = consumer
                async with progress(
                    lambda: (consumer, self._printed), quiet=o.quiet, beside_output=True
                ):
                    await self._print(consumer)

    async def _print(self, consumer: FeedConsumer) -> None:
        async for batch in consumer.batches():
            events, complete = self._within_limit(batch)
            await self._output.write(self._lines.format(batch, events))
            self._printed += len(events)
            if not complete:
                return
            await batch.commit()
            if self._remaining == 0:
                return

    def _within_limit(self, batch: Batch) -> tuple[Sequence[Event], bool]:
        """Return the events of the batch that `--limit` allows, and whether these are all.

        With a store these are all events up to the next cursor: it could not move otherwise.
        """
        if self._remaining is None:
            return batch.events, True
        if self.o.store is not None:
            self._remaining = max(0, self._remaining - len(batch.events))
            return batch.events, True
        events = batch.events[: self._remaining]
        self._remaining -= len(events)
        return events, len(events) == len(batch.events)

    def _store(self) -> AbstractAsyncContextManager[CursorStore]:
        if self.o.store is None:
            from feedapi_client.stores.sqlite import MemoryCursorStore

            return nullcontext(MemoryCursorStore())
        from feedapi_client.operations.opening import open_store

        return opened(open_store(self.o.store, create=True))

    async def _note_stored_cursors(self, consumer: FeedConsumer) -> None:
        """Say on stderr that stored cursors come before ``--from``."""
        if self.o.start is None or self.o.store is None:
            return
        stored, chosen = await consumer.store.load(consumer.key), self.o.partitions
        if stored.keys() & set(chosen or ()) or (stored and not chosen):
            say(
                f"goes on from the stored cursors of {self.o.feed.name!r}: "
                "--from does not apply ('feedapi cursors reset' forgets them)"
            )
