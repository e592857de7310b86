"""Reads of one partition: limits, checkpoints, refusals, retries (R3, R10, R13, R14)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, repeat
from typing import Any

import httpx
import pytest

from feedapi_client.client import SyncFeedClient
from feedapi_client.errors import (
    AuthenticationError,
    BufferLimitError,
    FeedUnavailableError,
    LineTooLongError,
    NoProgressError,
    ProtocolError,
)
from feedapi_client.model import FIRST
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fetch import (
    FetchResult,
    PatientFetch,
    Target,
    fetch,
    read_end,
)
from feedapi_client.spark.source_options import OptionError, parse_options
from feedapi_client.testing import Publisher, Quirks
from feedapi_client.testing.publisher.faults import (
    EmptyPage,
    NoCheckpoint,
    Rewrite,
    SameCheckpoint,
    Status,
    Truncate,
)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(page_size=50, checkpoint_every=10)
    publisher.extend(0, ({"n": n} for n in range(100)))
    with publisher.serve():
        yield publisher


def connect(publisher: Publisher, **given: str) -> FeedConnection:
    assert publisher.url is not None
    return FeedConnection(
        parse_options({"url": publisher.url, "baseDelay": "0.001", "maxDelay": "0.01", **given})
    )


def read(
    publisher: Publisher, *, cursor: str = FIRST, given: dict[str, str] | None = None
) -> tuple[list[CheckpointedEvents], FetchResult]:
    """Read as a batch read does, with all patience."""
    reading = PatientFetch(connect(publisher, **(given or {})), Target(0, cursor))
    return list(reading.batches()), reading.result


def task(publisher: Publisher, **how: Any) -> tuple[list[CheckpointedEvents], FetchResult]:
    """Read as a task of a stream does."""
    batches: list[CheckpointedEvents] = []
    result = fetch(connect(publisher), Target(0, FIRST), receive=batches.append, **how)
    return batches, result


def numbers(batches: list[CheckpointedEvents]) -> list[int]:
    return [event.json()["n"] for batch in batches for event in batch.events]


def test_open_partition_is_read_until_caught_up(publisher: Publisher) -> None:
    batches, result = read(publisher)
    assert numbers(batches) == list(range(100))
    assert (result.events, result.cursor) == (100, publisher.end_cursor(0))


@pytest.mark.parametrize("payload", [b'[{"n":100}]', b"17", b"true", b"null"])
def test_r03_forbidden_payload_is_a_row_like_others(publisher: Publisher, payload: bytes) -> None:
    publisher.extend(0, [{"mark": 1}, {"n": 101}])
    publisher.fail(Rewrite(lambda body: body.replace(b'{"mark":1}', payload)), times=None)
    batches, result = read(publisher)
    assert result.events == 102
    payloads = [event.raw for batch in batches for event in batch.events]
    assert payloads[100:] == [payload, b'{"n":101}']


def test_r6_closed_partition_ends_at_last_cursor_without_another_request(
    publisher: Publisher,
) -> None:
    publisher.quirks = Quirks(last_cursor="closed")
    publisher.close(0)
    _, result = read(publisher)
    assert result.cursor == publisher.end_cursor(0)
    assert publisher.counters["fetch"] == 2


def test_r6_without_last_cursor_an_empty_response_is_the_end(publisher: Publisher) -> None:
    publisher.quirks = Quirks(last_cursor="never")
    publisher.close(0)
    _, result = read(publisher, given={"settleTime": "0.1"})
    assert (result.events, result.cursor) == (100, publisher.end_cursor(0))


@pytest.mark.parametrize(("limit", "events"), [(100, 100), (55, 50), (10, 10), (19, 10), (3, 10)])
def test_r3_limit_cuts_at_the_last_checkpoint_within_it(
    publisher: Publisher, limit: int, events: int
) -> None:
    batches, result = task(publisher, limit=limit)
    assert numbers(batches) == list(range(events))
    again, _ = read(publisher, cursor=result.cursor)
    assert numbers(again) == list(range(events, 100))


def test_more_is_set_only_when_further_events_were_seen(publisher: Publisher) -> None:
    assert task(publisher, limit=55)[1].more
    assert not task(publisher, limit=50)[1].more


def test_r3_events_without_checkpoint_are_fetched_again(publisher: Publisher) -> None:
    publisher.fail(Truncate(after_lines=27), times=1)
    assert numbers(read(publisher)[0]) == list(range(100))


def test_r3_bytes_without_checkpoint_are_bounded(publisher: Publisher) -> None:
    publisher.extend(0, ({"n": n, "text": "x" * 100} for n in range(20_000)))
    publisher.checkpoint_every = publisher.page_size = 20_000
    with pytest.raises(BufferLimitError, match="max_buffered_bytes is 100000"):
        read(publisher, given={"maxBufferedBytes": "100000"})


def test_line_over_the_limit_is_not_retried(publisher: Publisher) -> None:
    publisher.append(0, {"n": "x" * 5000})
    with pytest.raises(LineTooLongError):
        read(publisher, given={"maxLineBytes": "1000"})


@pytest.mark.parametrize("fault", [503, 429, 408])
def test_r14_temporary_errors_are_retried(publisher: Publisher, fault: int) -> None:
    publisher.fail(fault, times=3)
    assert numbers(read(publisher)[0]) == list(range(100))


def test_r14_batch_read_raises_the_error_after_give_up_after(publisher: Publisher) -> None:
    publisher.fail(503, times=None)
    with pytest.raises(FeedUnavailableError):
        read(publisher, given={"giveUpAfter": "0.05"})


def test_r14_task_that_read_nothing_tries_twice(publisher: Publisher) -> None:
    publisher.fail(503, times=1)
    assert numbers(task(publisher)[0]) == list(range(100))
    publisher.fail(503, times=None)
    publisher.clear_requests()
    assert task(publisher)[0] == []
    assert [request.kind for request in publisher.requests].count("fetch") == 2


def test_r14_task_keeps_what_came_before_a_failure(publisher: Publisher) -> None:
    publisher.fail(503, times=None, after=1)
    assert numbers(task(publisher)[0]) == list(range(50))


def test_r14_task_does_not_wait_for_a_retry_after(publisher: Publisher) -> None:
    publisher.fail(Status(429, headers={"retry-after": "3600"}), times=None)
    task(publisher)
    assert publisher.counters["fetch"] == 1


def test_task_raises_what_no_attempt_repairs(publisher: Publisher) -> None:
    publisher.fail(SameCheckpoint(), times=None)
    with pytest.raises(NoProgressError):
        task(publisher)


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


def test_r14_batch_read_of_such_a_response_is_an_error(publisher: Publisher) -> None:
    with pytest.raises(FeedUnavailableError, match="no checkpoint came within 5 s"):
        trickled(publisher, repeat(b"\n"), given={"giveUpAfter": "0"})


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


def test_wrong_credentials_are_not_retried(publisher: Publisher) -> None:
    connection = connect(publisher)
    connection.discover()
    publisher.bearer = "x"
    with pytest.raises(AuthenticationError):
        list(PatientFetch(connection, Target(0, FIRST)).batches())
    assert fetch(connection, Target(0, FIRST)).refused == 401  # the driver discovers


def test_r10_new_token_is_fetched_after_a_conflict(publisher: Publisher) -> None:
    connection = connect(publisher)
    connection.discover()
    publisher.rotate_token()
    assert fetch(connection, Target(0, FIRST)).refused == 409  # which is left to the driver
    batches = list(PatientFetch(connection, Target(0, FIRST)).batches())
    assert numbers(batches) == list(range(100))


def test_r10_repeated_conflicts_are_an_error(publisher: Publisher) -> None:
    publisher.fail(409, times=None)
    with pytest.raises(ProtocolError, match="409 again and again"):
        read(publisher, given={"refusedFor": "0.1"})


@pytest.mark.parametrize("status", [400, 404, 410])
def test_r10_other_refusals_are_reported_in_the_result(publisher: Publisher, status: int) -> None:
    publisher.fail(status, times=None)
    assert read(publisher)[1].refused == status
    assert task(publisher)[1].refused == status


def test_r10_partition_that_is_no_longer_listed_is_reported_in_the_result(
    publisher: Publisher,
) -> None:
    connection = connect(publisher)
    connection.discover()
    publisher.split(0, into=2, method="cursor-from")
    reading = PatientFetch(connection, Target(0, FIRST))
    assert list(reading.batches()) == []
    assert reading.result.refused == 0


@pytest.mark.parametrize("fault", [SameCheckpoint(), NoCheckpoint()])
def test_r13_events_without_new_cursor_are_an_error_after_some_attempts(
    publisher: Publisher, fault: Any
) -> None:
    publisher.fail(fault, times=None)
    with pytest.raises(NoProgressError, match="brought events and no new cursor"):
        read(publisher)


def test_r6_empty_pages_that_move_the_cursor_are_not_the_end(publisher: Publisher) -> None:
    publisher.fail(EmptyPage(), times=5)
    assert numbers(read(publisher)[0]) == list(range(100))


def test_read_stops_when_the_caller_is_full(publisher: Publisher) -> None:
    _, result = task(publisher, full=lambda: True)
    assert 0 < result.events < 100


def test_read_end_returns_the_cursor_behind_the_newest_event(publisher: Publisher) -> None:
    end = read_end(connect(publisher), 0)
    publisher.append(0, {"n": 100})
    assert numbers(read(publisher, cursor=end)[0]) == [100]


def test_filter_that_the_feed_does_not_offer_is_an_error(publisher: Publisher) -> None:
    publisher.dialect = "v2-draft"
    with pytest.raises(ProtocolError, match="does not offer filter 'colour'"):
        connect(publisher, **{"filter.colour": "red"}).discover()


def test_filter_that_matches_two_names_is_refused(publisher: Publisher) -> None:
    publisher.dialect = "v2-draft"
    publisher.filters = {
        "Subject": lambda payload, value: True,
        "subject": lambda payload, value: True,
    }
    with pytest.raises(OptionError, match="matches several filters"):
        connect(publisher, **{"filter.SUBJECT": "x"}).discover()
