"""``feedapi cat``: print the events of a feed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import orjson

from feedapi_client.cli import options
from feedapi_client.cli.command import REMOVED, Stopping, command, flag, option, stopping
from feedapi_client.cli.terminal import progress, reader_gone, write_bytes
from feedapi_client.options import Limits

if TYPE_CHECKING:
    from feedapi_client.model import Batch, Event
    from feedapi_client.stores.base import CursorStore

_PART = re.compile(r"%(?P<verb>.)|\\(?P<escape>.)|(?P<text>[^%\\]+)|(?P<odd>[%\\])", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}
# The fields behind the properties `raw` and `headers` of an event: reading them takes 0.2 µs less
# for each event, a fifth of the CPU time of the whole command.
_payload = attrgetter("_payload")
_headers = attrgetter("_headers")

Printed = Callable[["Batch", "Event", int], bytes]
"""What a part of a template prints for an event, the so many-th one of the run."""
Form = Callable[["Batch", "Sequence[Event]", int], bytes]
"""What is printed for some events of a batch, before which so many were printed."""
VERBS: dict[str, tuple[str, Printed]] = {
    "p": ("partition", lambda batch, _event, _number: b"%d" % batch.partition),
    "s": ("payload, as sent", lambda _batch, event, _number: event.raw),
    "S": ("its bytes", lambda _batch, event, _number: b"%d" % len(event.raw)),
    "h": ("headers", lambda _batch, event, _number: orjson.dumps(event.headers or {})),
    "c": ("cursor behind it", lambda batch, _event, _number: batch.cursor.encode()),
    "i": ("number", lambda _batch, _event, number: b"%d" % number),
    "%": ("a percent sign", lambda _batch, _event, _number: b"%"),
}
_MEANINGS = ", ".join(f"%{verb} {meaning}" for verb, (meaning, _) in VERBS.items())


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
        help="Read only this partition, without waiting for its parents. Repeatable."
    )
    store: str | None = option(
        "STORE",
        "Keep cursors in this SQLite file (or database URL, or env:NAME), and go on from there "
        "next time.",
        envvar="FEEDAPI_STORE",
    )
    raw: bool = flag("Print payloads alone, byte for byte as they were sent.")
    template: str | None = option(
        "TEMPLATE",
        rf"Print each event by a template, such as '%p %c %s\n': {_MEANINGS}.",
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
    stream: bool = flag("Hold responses open, where the feed offers that; with --follow.")
    unordered: bool = flag("Read all partitions at once, without waiting for their parents.")
    quiet: bool = options.quiet()

    def __post_init__(self) -> None:
        if self.raw and self.template is not None:
            raise ValueError("--format can't be combined with --raw")
        self.feed.events.fetch(**self.fetch())
        self.form()
        self.begin()

    def fetch(self) -> dict[str, Any]:
        limit = self.limit if self.store and not self.stream else None
        size = self.page_size_hint or limit  # a cursor comes where the limit is
        return {"page_size_hint": size, "stream": self.stream, "v1_headers": self.v1_headers or ()}

    def form(self) -> Form:
        if self.template is not None:
            return _by_template(self.template)
        return _payloads if self.raw else _lines

    def begin(self) -> Literal["first", "last"] | dict[int, str] | None:
        if not self.start:
            return None
        if special := re.fullmatch("_?(first|last)", self.start):
            return "last" if special[1] == "last" else "first"
        if self.partitions is None or len(self.partitions) != 1:
            raise ValueError(
                "--from CURSOR needs one --partition: a cursor belongs to one partition. "
                f"--from TIME is gone: {REMOVED['cat --from TIME']}"
            )
        return {self.partitions[0]: options.cursor(self.start)}

    def open(self) -> AbstractAsyncContextManager[CursorStore]:
        if self.store is None:
            from feedapi_client.stores.sqlite import MemoryCursorStore

            return nullcontext(MemoryCursorStore())
        return options.Store(store=self.store).open(create=True)


@command(
    "cat https://service/myfeed --limit 10",
    "cat https://service/myfeed --follow --from last --raw",
    "cat https://service/myfeed --store cursors.db --name report",
    r"cat https://service/myfeed --format '%p %c %s\n'",
    "cat https://service/myfeed --partition 3 --from CURSOR --ca-file company.pem --auth-env TOKEN",
)
async def cat(o: _Cat) -> int:
    """Print a feed's events, one line of JSON each: {"partition":2,"data":…}.

    Ends at the end of the feed, or goes on with --follow until Ctrl-C. With --store the cursors
    are committed, each after the events before it were written and flushed. Events that were not
    written because the reader closed the pipe come again next time. Ctrl-C ends it after the batch
    in flight.
    """
    import anyio

    async with stopping() as stop, anyio.create_task_group() as tasks:

        async def end_with_the_reader() -> None:
            await reader_gone()
            tasks.cancel_scope.cancel()

        tasks.start_soon(end_with_the_reader)
        await _print_events(o, stop)
        tasks.cancel_scope.cancel()
    return stop.exit_code


async def _print_events(o: _Cat, stop: Stopping) -> None:
    """Print until the end of the feed, the limit or a signal.

    With a store the limit counts events up to a cursor, which could not move otherwise.
    """
    form, printed = o.form(), 0
    async with (
        o.open() as store,
        o.feed.consumer(
            store,
            fetch=o.fetch(),
            start=o.begin(),
            ordered=not o.unordered,
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
            await write_bytes(form(batch, events, printed))
            printed += len(events)
            if len(events) < len(batch.events):
                return
            await batch.commit()
            if o.limit is not None and printed >= o.limit:
                return


def _payloads(_batch: Batch, events: Sequence[Event], _before: int) -> bytes:
    return b"\n".join(map(_payload, events)) + b"\n" if events else b""


def _lines(batch: Batch, events: Sequence[Event], _before: int) -> bytes:
    start = b'{"partition":%d,' % batch.partition
    if any(map(_headers, events)):
        return b"".join([start + _with_headers(event) for event in events])
    start += b'"data":'
    return start + (b"}\n" + start).join(map(_payload, events)) + b"}\n" if events else b""


def _with_headers(event: Event) -> bytes:
    headers = b'"headers":' + orjson.dumps(event.headers) + b"," if event.headers else b""
    return b'%s"data":%s}\n' % (headers, event.raw)


def _by_template(template: str) -> Form:
    parts = [_part(found) for found in _PART.finditer(template)]

    def printed(batch: Batch, events: Sequence[Event], before: int) -> bytes:
        return b"".join(
            [part(batch, event, n) for n, event in enumerate(events, before + 1) for part in parts]
        )

    return printed


def _part(found: re.Match[str]) -> Printed:
    if (verb := found["verb"]) is not None:
        if (successor := REMOVED.get(f"cat --format %{verb}")) is not None:
            raise ValueError(f"%{verb} is gone: {successor}")
        if verb not in VERBS:
            raise ValueError(f"--format: there is no verb %{verb}; there are: {_MEANINGS}")
        return VERBS[verb][1]
    if found["odd"]:
        raise ValueError(f"--format: {found['odd']} at the end: double it")
    escape = str(found["escape"])
    if found["text"] is None and escape not in _ESCAPES:
        raise ValueError(f"--format: there is no escape \\{escape}")
    text = str(found["text"] or _ESCAPES[escape]).encode()
    return lambda _batch, _event, _number: text
