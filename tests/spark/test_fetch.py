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
from feedapi_client.spark.fetch import FetchResult, PartitionReader, Target, read_end
from feedapi_client.spark.source_options import OptionError, parse_options
from feedapi_client.testing import Publisher, Quirks
from feedapi_client.testing.publisher.faults import (
    EmptyPage,
    NoCheckpoint,
    Rewrite,
    SameCheckpoint,
    Status,
    Truncate,
    UnknownCommands,
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
    publisher: Publisher, *, cursor: str = FIRST, given: dict[str, str] | None = None, **how: Any
) -> tuple[list[CheckpointedEvents], FetchResult]:
    batches: list[CheckpointedEvents] = []
    result = PartitionReader(connect(publisher, **(given or {})), Target(0, cursor), **how).read(
        batches.append
    )
    return batches, result


def numbers(batches: list[CheckpointedEvents]) -> list[int]:
    return [event.json()["n"] for batch in batches for event in batch.events]


def test_open_partition_is_read_until_caught_up(publisher: Publisher) -> None:
    batches, result = read(publisher)
    assert numbers(batches) == list(range(100))
    assert (result.events, result.cursor, result.ended, result.asked_closed) == (
        100,
        publisher.end_cursor(0),
        True,
        False,
    )


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
    assert (result.ended, result.asked_closed) == (True, True)
    assert publisher.counters["fetch"] == 2


def test_r6_without_last_cursor_an_empty_response_is_the_end(publisher: Publisher) -> None:
    publisher.quirks = Quirks(last_cursor="never")
    publisher.close(0)
    _, result = read(publisher, given={"settleTime": "0.1"})
    assert (result.events, result.ended, result.asked_closed) == (100, True, True)


@pytest.mark.parametrize(("limit", "events"), [(100, 100), (55, 50), (10, 10), (19, 10), (3, 10)])
def test_r3_limit_cuts_at_the_last_checkpoint_within_it(
    publisher: Publisher, limit: int, events: int
) -> None:
    batches, result = read(publisher, limit=limit)
    assert numbers(batches) == list(range(events))
    again, _ = read(publisher, cursor=result.cursor)
    assert numbers(again) == list(range(events, 100))


def test_more_is_set_only_when_further_events_were_seen(publisher: Publisher) -> None:
    assert read(publisher, limit=55)[1].more
    assert not read(publisher, limit=50)[1].more


def test_r3_events_without_checkpoint_are_fetched_again(publisher: Publisher) -> None:
    publisher.fail(Truncate(after_lines=27), times=1)
    batches, result = read(publisher)
    assert numbers(batches) == list(range(100))
    assert result.ended


def test_r3_bytes_without_checkpoint_are_bounded(publisher: Publisher) -> None:
    publisher.extend(0, ({"n": n, "text": "x" * 100} for n in range(20_000)))
    publisher.checkpoint_every = publisher.page_size = 20_000
    with pytest.raises(BufferLimitError, match="option maxBufferedBytes is 100000"):
        read(publisher, given={"maxBufferedBytes": "100000"})


def test_line_over_the_limit_is_not_retried(publisher: Publisher) -> None:
    publisher.append(0, {"n": "x" * 5000})
    with pytest.raises(LineTooLongError):
        read(publisher, given={"maxLineBytes": "1000"})


@pytest.mark.parametrize("fault", [503, 429, 408])
def test_r14_temporary_errors_are_retried(publisher: Publisher, fault: int) -> None:
    publisher.fail(fault, times=3)
    assert numbers(read(publisher)[0]) == list(range(100))


def test_r14_without_grace_period_the_error_is_raised_after_give_up_after(
    publisher: Publisher,
) -> None:
    publisher.fail(503, times=None)
    with pytest.raises(FeedUnavailableError):
        read(publisher, given={"giveUpAfter": "0.05"})


def test_r14_after_the_grace_period_the_result_says_failed(publisher: Publisher) -> None:
    publisher.fail(503, times=None)
    batches, result = read(publisher, grace_period=0.05)
    assert batches == []
    assert result.failed is not None
    assert result.failed.startswith("FeedUnavailableError: the publisher answers status 503")


def test_r14_batches_before_a_failure_are_kept(publisher: Publisher) -> None:
    publisher.fail(503, times=None, after=1)
    batches, result = read(publisher, grace_period=0.05)
    assert numbers(batches) == list(range(50))
    assert (result.failed, result.ended) == (None, False)


def test_r14_retry_after_beyond_the_grace_period_is_not_awaited(publisher: Publisher) -> None:
    publisher.fail(Status(429, headers={"retry-after": "3600"}), times=None)
    _, result = read(publisher, grace_period=30)
    assert result.failed is not None
    assert publisher.counters["fetch"] == 1


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
    publisher: Publisher, *bodies: Iterable[Chunk], given: dict[str, str], **how: Any
) -> tuple[FetchResult, list[int], list[float]]:
    """Read partition 0, whose responses have these bodies.

    Return the result, the numbers of the events, and the seconds that each response was read for.
    """
    streams = [Trickle(body) for body in bodies]
    left = iter(streams)
    connection = connect(publisher, slotTimeout="5", **given)
    connection.discover()
    connection.client = SyncFeedClient(
        connection.options.url,
        http=httpx.Client(
            transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=next(left)))
        ),
        fetch=connection.options.fetch,
    )
    batches: list[CheckpointedEvents] = []
    with connection.client:
        result = PartitionReader(
            connection,
            Target(0, FIRST),
            clock=lambda: sum(stream.now for stream in streams),
            **how,
        ).read(batches.append)
    return result, numbers(batches), [stream.now for stream in streams]


BEATS = [b"\n", b'{"heartbeat":1}\n', b'{"cursor":"_first"}\n', b'{"data":{"n":1}}\n', b"x"]
"""Chunks that never bring a checkpoint behind events: one event for ever, too."""


@pytest.mark.parametrize("beat", BEATS)
def test_r14_response_without_a_checkpoint_fails_and_next_time_has_twice_as_long(
    publisher: Publisher, beat: bytes
) -> None:
    result, events, seconds = trickled(
        publisher, repeat(beat), repeat(beat), given={}, grace_period=5
    )
    assert events == []
    assert result.failed is not None
    assert "no checkpoint came within 10 s" in result.failed
    assert "slotTimeout" in result.failed
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
    assert (len(events), result.ended, result.retries) == (20, True, 0)
    assert seconds[0] == 80


def test_r14_silence_that_a_checkpoint_ends_is_no_failure(publisher: Publisher) -> None:
    """One read that took long, as where the publisher computes a page."""
    page = (29.0, b'{"data":{"n":1}}\n{"cursor":"1"}\n')
    result, events, _ = trickled(
        publisher, [page], [b'{"cursor":"1"}\n'], given={}, grace_period=60
    )
    assert (events, result.retries) == ([1], 0)


def test_r14_epoch_does_not_wait_for_a_response_that_never_ends(publisher: Publisher) -> None:
    """Other partitions of the epoch do: what came is kept, and read on from later."""
    body = (b'{"data":{"n":1}}\n{"cursor":"%d"}\n' % n for n in count())
    result, events, seconds = trickled(publisher, body, given={}, grace_period=5)
    assert (len(events), result.failed, result.ended) == (6, None, False)
    assert (result.cursor, seconds) == ("5", [6])


def test_wrong_credentials_are_not_retried(publisher: Publisher) -> None:
    connection = connect(publisher)
    connection.discover()
    publisher.bearer = "x"
    with pytest.raises(AuthenticationError):
        PartitionReader(connection, Target(0, FIRST)).read()


def test_r10_new_token_is_fetched_after_a_conflict(publisher: Publisher) -> None:
    connection = connect(publisher)
    connection.discover()
    publisher.rotate_token()
    batches: list[CheckpointedEvents] = []
    PartitionReader(connection, Target(0, FIRST)).read(batches.append)
    assert numbers(batches) == list(range(100))


def test_r10_result_says_that_the_partitions_may_have_changed(publisher: Publisher) -> None:
    _, result = read(publisher)
    assert (result.conflict, result.unknown_commands) == (False, False)
    publisher.fail(409)
    _, result = read(publisher)
    assert (result.conflict, result.unknown_commands) == (True, False)
    publisher.fail(UnknownCommands())
    _, result = read(publisher)
    assert (result.conflict, result.unknown_commands) == (False, True)


@pytest.mark.usefixtures("short_waits")
def test_r10_repeated_conflicts_are_an_error(publisher: Publisher) -> None:
    publisher.fail(409, times=None)
    with pytest.raises(ProtocolError, match="409 again and again"):
        read(publisher)


@pytest.mark.parametrize("status", [400, 404, 410])
def test_r10_other_refusals_are_reported_in_the_result(publisher: Publisher, status: int) -> None:
    publisher.fail(status, times=None)
    assert read(publisher)[1].refused == status


def test_r10_partition_that_is_no_longer_listed_is_reported_in_the_result(
    publisher: Publisher,
) -> None:
    connection = connect(publisher)
    connection.discover()
    publisher.split(0, into=2, method="cursor-from")
    assert PartitionReader(connection, Target(0, FIRST)).read().refused == 0


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
    _, result = read(publisher, full=lambda: True)
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
