"""Reads of one partition: limits, checkpoints, refusals, retries (R3, R10, R13, R14)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import count, repeat
from typing import Any

import httpx
import pytest

from feedapi_client.client import SyncFeedClient
from feedapi_client.errors import (
    AuthenticationError,
    BufferLimitError,
    CursorRejectedError,
    FeedUnavailableError,
    LineTooLongError,
    NoProgressError,
    ProtocolError,
)
from feedapi_client.model import FIRST
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.spark.batch import FeedReader
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fetch import FetchResult, PatientFetch, Target, fetch
from feedapi_client.spark.source_options import OptionError
from feedapi_client.testing import Publisher, Quirks
from feedapi_client.testing.publisher.faults import (
    EmptyPage,
    NoCheckpoint,
    Rewrite,
    SameCheckpoint,
    Status,
    Truncate,
)
from tests.spark.micro_batches import options_for, rows_of


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(page_size=50, checkpoint_every=10)
    publisher.extend(0, ({"n": n} for n in range(100)))
    with publisher.serve():
        yield publisher


def read(publisher: Publisher, fault: Any = None, times: int | None = None, **given: str) -> Any:
    """Read in batch; planned before the fault. Return the payloads."""
    reader = FeedReader(options_for(publisher, maxDelay="0.01", **given))
    parts = reader.partitions()
    if fault is not None:
        publisher.fail(fault, times=times)
    return [json.loads(row["data"]) for row in rows_of(reader, parts)]


def connect(publisher: Publisher, **given: str) -> FeedConnection:
    return FeedConnection(options_for(publisher, maxDelay="0.01", **given))


def numbers(batches: list[CheckpointedEvents]) -> list[int]:
    return [event.json()["n"] for batch in batches for event in batch.events]


# ---------------------------------------------------------------------- in batch, with all patience


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        *((status, 3) for status in (503, 429, 408)),
        (Truncate(after_lines=27), 1),  # events without a checkpoint are fetched again (R3)
        (EmptyPage(), 5),  # which moves the cursor, and is no end (R6)
    ],
)
def test_r14_what_passes_is_tried_again(publisher: Publisher, fault: Any, times: int) -> None:
    assert read(publisher, fault, times) == [{"n": n} for n in range(100)]


@pytest.mark.parametrize(
    ("fault", "given", "kind", "message"),
    [
        (503, {"giveUpAfter": "0.05"}, FeedUnavailableError, "status 503"),
        (409, {"refusedFor": "0.1"}, ProtocolError, "409 again and again"),
        *(
            (status, {}, CursorRejectedError, rf"\(status {status}\): the partitions changed")
            for status in (400, 404, 410)
        ),
        *(
            (fault, {}, NoProgressError, "brought events and no new cursor")
            for fault in (SameCheckpoint(), NoCheckpoint())
        ),
        (None, {"maxLineBytes": "1000"}, LineTooLongError, "1000"),
        (None, {"maxBufferedBytes": "1000"}, BufferLimitError, "max_buffered_bytes is 1000"),
    ],
)
def test_r10_r13_r14_what_lasts_is_an_error(
    publisher: Publisher, fault: Any, given: dict[str, str], kind: Any, message: str
) -> None:
    if "maxLineBytes" in given:
        publisher.append(0, {"n": "x" * 5000})
    if "maxBufferedBytes" in given:
        publisher.checkpoint_every = publisher.page_size = 200
    with pytest.raises(kind, match=message):
        read(publisher, fault, **given)


@pytest.mark.parametrize(
    ("dialect", "given", "rows"),
    [
        ("v1", {"v1Partitions": "1"}, 100),
        ("v2-draft", {}, 100),
        ("v2-token", {}, 100),
        ("v2-token", {"eventTypes": "odd"}, 50),
        ("v2-token", {"skipEventTypes": "odd;even"}, 0),
        ("v2-token", {"partitions": "0"}, 100),
    ],
)
def test_dialects_and_selections_in_batch(dialect: Any, given: Any, rows: int) -> None:
    publisher = Publisher(partitions=1 + ("partitions" in given), dialect=dialect)
    for n in range(100):
        for partition in publisher.open_partitions():
            publisher.append(partition, {"n": n, "type": "odd" if n % 2 else "even"})
    with publisher.serve():
        assert len(read(publisher, **given)) == rows


@pytest.mark.parametrize("payload", [b'[{"n":100}]', b"17", b"true", b"null"])
def test_r03_forbidden_payload_is_a_row_like_others(publisher: Publisher, payload: bytes) -> None:
    publisher.extend(0, [{"mark": 1}, {"n": 101}])
    found = read(publisher, Rewrite(lambda body: body.replace(b'{"mark":1}', payload)))
    assert found[100:] == [json.loads(payload), {"n": 101}]


@pytest.mark.parametrize(("listed", "fetches"), [("closed", 2), ("never", 3)])
def test_r6_end_of_a_closed_partition(publisher: Publisher, listed: Any, fetches: int) -> None:
    """At its last cursor without another request, else by empty responses."""
    publisher.quirks = Quirks(last_cursor=listed)
    publisher.close(0)
    assert len(read(publisher, settleTime="0.1")) == 100
    assert publisher.counters["fetch"] >= fetches
    assert (publisher.counters["fetch"] == fetches) == (listed == "closed")


def test_r10_new_token_and_partition_that_is_no_longer_listed(publisher: Publisher) -> None:
    reader = FeedReader(options_for(publisher))
    parts = reader.partitions()
    publisher.rotate_token()
    assert len(rows_of(reader, parts)) == 100
    publisher.split(0, into=2, method="cursor-from")
    with pytest.raises(CursorRejectedError, match="it is not listed any more"):
        rows_of(reader, parts)


# ---------------------------------------------------------------------- as a task of a stream does


@pytest.mark.parametrize(
    ("fault", "times", "after", "events", "fetches"),
    [
        (503, 1, 0, 100, 4),  # what read nothing is tried once more
        (503, None, 0, 0, 2),
        (503, None, 1, 50, 2),  # what came before a failure is kept
        (Status(429, headers={"retry-after": "3600"}), None, 0, 0, 1),  # others would wait
    ],
)
def test_r14_task_tries_twice_and_waits_for_nobody(
    publisher: Publisher, fault: Any, times: int | None, after: int, events: int, fetches: int
) -> None:
    batches: list[CheckpointedEvents] = []
    publisher.fail(fault, times=times, after=after)
    fetch(connect(publisher), Target(0, FIRST), receive=batches.append)
    assert numbers(batches) == list(range(events))
    assert publisher.counters["fetch"] == fetches


def test_task_raises_what_no_attempt_repairs(publisher: Publisher) -> None:
    publisher.fail(SameCheckpoint(), times=None)
    with pytest.raises(NoProgressError):
        fetch(connect(publisher), Target(0, FIRST))


def test_r10_refusals_are_left_to_the_driver(publisher: Publisher) -> None:
    connection = connect(publisher)
    connection.discover()
    publisher.rotate_token()  # 409
    assert fetch(connection, Target(0, FIRST)) == FetchResult(0, FIRST, FIRST)
    publisher.bearer = "x"  # 401
    assert fetch(connection, Target(0, FIRST)) == FetchResult(0, FIRST, FIRST)
    assert publisher.counters["fetch"] == 2
    with pytest.raises(AuthenticationError):  # which a batch read does not repeat
        list(PatientFetch(connection, Target(0, FIRST)).batches())


# ---------------------------------------------------------------------- responses that trickle


Chunk = bytes | tuple[float, bytes]


class Trickle(httpx.SyncByteStream):
    """A body whose chunks come after so many seconds each, by default one, on its own clock."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.chunks = chunks
        self.now = 0.0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            seconds, content = chunk if isinstance(chunk, tuple) else (1.0, chunk)
            self.now += seconds
            yield content


def trickled(
    publisher: Publisher, *bodies: Iterable[Chunk], given: dict[str, str] | None = None
) -> tuple[FetchResult, list[int], list[float]]:
    """Read partition 0 for a task, or as a batch read with options, from these bodies of responses.

    Return the result, the numbers of the events, and the seconds that each response was read for.
    """
    streams = [Trickle(body) for body in bodies]
    left = iter(streams)
    connection = connect(publisher, slotTimeout="5", **(given or {}))
    connection.discover()
    connection.client = SyncFeedClient(
        connection.options.url,
        http=httpx.Client(
            transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=next(left)))
        ),
        fetch=connection.options.fetch,
    )
    batches: list[CheckpointedEvents] = []

    def clock() -> float:
        return sum(stream.now for stream in streams)

    with connection.client:
        if given is None:
            result = fetch(connection, Target(0, FIRST), receive=batches.append, clock=clock)
        else:
            reading = PatientFetch(connection, Target(0, FIRST), clock=clock)
            batches += reading.batches()
            result = reading.result
    return result, numbers(batches), [stream.now for stream in streams]


BEATS = [b"\n", b'{"heartbeat":1}\n', b'{"cursor":"_first"}\n', b'{"data":{"n":1}}\n', b"x"]
"""Chunks that never bring a checkpoint behind events: one event for ever, too."""


@pytest.mark.parametrize("beat", BEATS)
def test_r14_response_without_a_checkpoint_fails_and_next_time_has_twice_as_long(
    publisher: Publisher, beat: bytes
) -> None:
    result, events, seconds = trickled(publisher, repeat(beat), repeat(beat))
    assert (events, result.cursor) == ([], FIRST)
    assert seconds == [6, 11]
    with pytest.raises(FeedUnavailableError, match="no checkpoint came within 5 s"):
        trickled(publisher, repeat(beat), given={"giveUpAfter": "0"})


def test_r14_checkpoints_that_come_in_time_keep_a_batch_read_going(publisher: Publisher) -> None:
    lines = [b"\n", b"\n", b'{"data":{"n":1}}\n', b'{"cursor":"%d"}\n']
    body = [line % n if b"%d" in line else line for n in range(20) for line in lines]
    given = {"settleTime": "0.01", "pollInterval": "0.001"}
    result, events, seconds = trickled(
        publisher, body, [b'{"cursor":"19"}\n'], [b'{"cursor":"19"}\n'], given=given
    )
    assert (len(events), result.cursor) == (20, "19")
    assert seconds[0] == 80


def test_r14_silence_that_a_checkpoint_ends_is_no_failure(publisher: Publisher) -> None:
    """One read that took long, as where the publisher computes a page."""
    page = (29.0, b'{"data":{"n":1}}\n{"cursor":"1"}\n')
    _, events, seconds = trickled(publisher, [page], [b'{"cursor":"1"}\n'], given={})
    assert (events, len(seconds)) == ([1], 2)


def test_r14_epoch_does_not_wait_for_a_response_that_never_ends(publisher: Publisher) -> None:
    """Other partitions of the epoch do: what came is kept, and read on from later."""
    body = (b'{"data":{"n":1}}\n{"cursor":"%d"}\n' % n for n in count())
    result, events, seconds = trickled(publisher, body)
    assert len(events) == 6
    assert (result.cursor, seconds) == ("5", [6])


@pytest.mark.parametrize(
    ("option", "filters", "kind", "message"),
    [
        ("filter.colour", [], ProtocolError, "does not offer filter 'colour'"),
        ("filter.SUBJECT", ["Subject", "subject"], OptionError, "matches several filters"),
    ],
)
def test_filter_that_is_not_one_of_the_feed_is_refused(
    publisher: Publisher, option: str, filters: list[str], kind: Any, message: str
) -> None:
    publisher.dialect = "v2-draft"
    publisher.filters = dict.fromkeys(filters, lambda payload, value: True)
    with pytest.raises(kind, match=message):
        connect(publisher, **{option: "red"}).discover()
