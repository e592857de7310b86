"""``feedapi cat``: print the events of a feed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from feedapi_client.cli import options
from feedapi_client.cli.command import Stopping, command, flag, option, stopping
from feedapi_client.cli.terminal import progress, write_bytes
from feedapi_client.options import Limits

if TYPE_CHECKING:
    from feedapi_client.model import Batch, Event
    from feedapi_client.stores.base import CursorStore

# The field behind the property `raw` of an event: reading it takes 0.2 µs less for each event, a
# tenth of the CPU time of the whole command.
_payload = attrgetter("_payload")

Form = Callable[["Batch", "Sequence[Event]"], bytes]
"""What is printed for some events of a batch."""


@dataclass(frozen=True, kw_only=True)
class _Cat:
    feed: options.Consumed
    follow: bool = flag("Go on at the end of the feed, until Ctrl-C.", "--follow -f")
    start: str | None = option(
        "first|last|CURSOR",
        "Where to begin; a cursor needs one --partition. Stored cursors come first.",
        flags="--from",
    )
    partitions: list[int] | None = options.some_partitions(
        "Read only this partition, without waiting for its parents. Repeatable."
    )
    store: str | None = option(
        "STORE",
        "Keep cursors in this SQLite file (or database URL, or env:NAME), and go on from there "
        "next time.",
        envvar="FEEDAPI_STORE",
    )
    raw: bool = flag("Print payloads alone, byte for byte as they were sent.")
    limit: int | None = option(
        "N",
        "End after N events; with --store at the first cursor behind them, so that the next run "
        "goes on there.",
        flags="--limit -n",
        min=1,
    )
    stream: bool = flag("Hold responses open, where the feed offers that; with --follow.")
    quiet: bool = options.quiet()

    def __post_init__(self) -> None:
        self.feed.events.fetch(**self.fetch())
        self.begin()

    def fetch(self) -> dict[str, Any]:
        # A cursor comes where the limit is.
        size = self.limit if self.store and not self.stream else None
        return {"page_size_hint": size, "stream": self.stream}

    def begin(self) -> Literal["first", "last"] | dict[int, str] | None:
        if not self.start:
            return None
        if special := re.fullmatch("_?(first|last)", self.start):
            return "last" if special[1] == "last" else "first"
        if self.partitions is None or len(self.partitions) != 1:
            raise ValueError(
                "--from CURSOR needs one --partition: a cursor belongs to one partition"
            )
        return {self.partitions[0]: options.cursor(self.start)}

    def open(self) -> AbstractAsyncContextManager[CursorStore]:
        """Open the store, one in memory where none is given."""
        if self.store is None:
            from feedapi_client.stores.sqlite import MemoryCursorStore

            return nullcontext(MemoryCursorStore())
        return options.Store(store=self.store).open(create=True)


@command(
    "cat https://service/myfeed --limit 10",
    "cat https://service/myfeed --follow --from last --raw",
    "cat https://service/myfeed --store cursors.db --name report",
    "cat https://service/myfeed --partition 3 --from CURSOR --ca-file company.pem --auth-env TOKEN",
)
async def cat(o: _Cat) -> int:
    """Print a feed's events, one line of JSON each: {"partition":2,"data":…}.

    Ends at the end of the feed, or goes on with --follow until Ctrl-C. With --store the cursors
    are committed, each after the events before it were written and flushed. Events that were not
    written because the reader closed the pipe come again next time. Ctrl-C ends it after the batch
    in flight.
    """
    async with stopping() as stop:
        await _print_events(o, stop)
    return stop.exit_code


async def _print_events(o: _Cat, stop: Stopping) -> None:
    """Print until the end of the feed, the limit or a signal.

    With a store the limit counts events up to a cursor, which could not move otherwise.
    """
    form: Form = _payloads if o.raw else _lines
    printed = 0
    async with (
        o.open() as store,
        o.feed.consumer(
            store,
            fetch=o.fetch(),
            start=o.begin(),
            follow=o.follow,
            partitions=o.partitions or None,
            retry=None if o.follow else options.one_shot(o.feed.give_up_after),
            # With a limit each checkpoint is a batch of its own, to end at the first one.
            limits=Limits() if o.limit is None else Limits(max_batch_bytes=1),
        ) as consumer,
        consumer,
        progress(lambda: (consumer, printed), quiet=o.quiet, beside_output=True),
    ):
        stop.consumer = consumer
        async for batch in consumer.batches():
            events: Sequence[Event] = batch.events
            if o.limit is not None and o.store is None:
                events = events[: o.limit - printed]
            await write_bytes(form(batch, events))
            printed += len(events)
            if len(events) < len(batch.events):
                return
            await batch.commit()
            if o.limit is not None and printed >= o.limit:
                return


# ---------------------------------------------------------------------- what is printed


def _payloads(_batch: Batch, events: Sequence[Event]) -> bytes:
    return b"\n".join(map(_payload, events)) + b"\n" if events else b""


def _lines(batch: Batch, events: Sequence[Event]) -> bytes:
    """Return lines of JSON around the payloads, which stay byte for byte as they were sent."""
    start = b'{"partition":%d,"data":' % batch.partition
    return start + (b"}\n" + start).join(map(_payload, events)) + b"}\n" if events else b""
