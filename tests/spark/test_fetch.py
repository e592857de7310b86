"""Reading one partition: limits, checkpoints, refusals, retries (R3, R10, R13, R14)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from feedapi_client.errors import (
    AuthenticationError,
    BufferLimitError,
    FeedUnavailableError,
    LineTooLongError,
    NoProgressError,
    ProtocolError,
)
from feedapi_client.model import FIRST
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.spark.fetch import Feed, Outcome, PartitionReader, Target, _lines, read_end
from feedapi_client.spark.options import OptionError, parse_options
from feedapi_client.testing import Publisher, Quirks
from feedapi_client.testing.publisher.faults import (
    EmptyPage,
    NoCheckpoint,
    SameCheckpoint,
    Truncate,
)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(page_size=50, checkpoint_every=10)
    publisher.extend(0, ({"n": n} for n in range(100)))
    with publisher.serve():
        yield publisher


def feed_of(publisher: Publisher, **given: str) -> Feed:
    assert publisher.url is not None
    return Feed(
        parse_options({"url": publisher.url, "baseDelay": "0.001", "maxDelay": "0.01", **given})
    )


def read(
    publisher: Publisher, *, cursor: str = FIRST, given: dict[str, str] | None = None, **how: Any
) -> tuple[list[CheckpointedEvents], Outcome]:
    runs: list[CheckpointedEvents] = []
    outcome = PartitionReader(feed_of(publisher, **(given or {})), Target(0, cursor), **how).read(
        runs.append
    )
    return runs, outcome


def numbers(runs: list[CheckpointedEvents]) -> list[int]:
    return [event.json()["n"] for run in runs for event in run.events]


def test_an_open_partition_is_read_until_it_is_caught_up(publisher: Publisher) -> None:
    runs, outcome = read(publisher)
    assert numbers(runs) == list(range(100))
    assert (outcome.events, outcome.cursor, outcome.ended, outcome.asked_closed) == (
        100,
        publisher.end_cursor(0),
        True,
        False,
    )


def test_a_closed_partition_ends_at_its_last_cursor_without_another_request(
    publisher: Publisher,
) -> None:
    publisher.quirks = Quirks(last_cursor="closed")
    publisher.close(0)
    _, outcome = read(publisher)
    assert (outcome.ended, outcome.asked_closed) == (True, True)
    assert publisher.counters["fetch"] == 2


def test_r6_without_a_last_cursor_the_end_is_an_empty_answer(publisher: Publisher) -> None:
    publisher.quirks = Quirks(last_cursor="never")
    publisher.close(0)
    _, outcome = read(publisher)
    assert (outcome.events, outcome.ended, outcome.asked_closed) == (100, True, True)


@pytest.mark.parametrize(("limit", "events"), [(100, 100), (55, 50), (10, 10), (19, 10), (3, 10)])
def test_r3_the_limit_cuts_at_the_last_checkpoint_within_it(
    publisher: Publisher, limit: int, events: int
) -> None:
    runs, outcome = read(publisher, limit=limit)
    assert numbers(runs) == list(range(events))
    again, _ = read(publisher, cursor=outcome.cursor)
    assert numbers(again) == list(range(events, 100))


def test_more_is_known_only_when_it_was_seen(publisher: Publisher) -> None:
    assert read(publisher, limit=55)[1].more
    assert not read(publisher, limit=50)[1].more


def test_r3_what_no_checkpoint_closed_is_fetched_again(publisher: Publisher) -> None:
    publisher.fail(Truncate(after_lines=27), times=1)
    runs, outcome = read(publisher)
    assert numbers(runs) == list(range(100))
    assert outcome.ended


def test_r3_a_run_without_a_checkpoint_is_bounded(publisher: Publisher) -> None:
    publisher.extend(0, ({"n": n, "text": "x" * 100} for n in range(20_000)))
    publisher.checkpoint_every = publisher.page_size = 20_000
    with pytest.raises(BufferLimitError, match="option maxBufferedBytes is 100000"):
        read(publisher, given={"maxBufferedBytes": "100000"})


def test_a_line_over_the_limit_is_an_error_that_is_not_retried(publisher: Publisher) -> None:
    publisher.append(0, {"n": "x" * 5000})
    with pytest.raises(LineTooLongError):
        read(publisher, given={"maxLineBytes": "1000"})


@pytest.mark.parametrize("fault", [503, 429, 408])
def test_r14_what_may_pass_is_retried(publisher: Publisher, fault: int) -> None:
    publisher.fail(fault, times=3)
    assert numbers(read(publisher)[0]) == list(range(100))


def test_r14_without_patience_the_error_comes_after_a_while(publisher: Publisher) -> None:
    publisher.fail(503, times=None)
    with pytest.raises(FeedUnavailableError):
        read(publisher, given={"giveUpAfter": "0.05"})


def test_r14_with_patience_a_failure_is_an_outcome(publisher: Publisher) -> None:
    publisher.fail(503, times=None)
    runs, outcome = read(publisher, patience=0.05)
    assert runs == []
    assert outcome.failed is not None
    assert outcome.failed.startswith("FeedUnavailableError: the publisher answers status 503")


def test_r14_what_was_read_before_the_failure_is_kept(publisher: Publisher) -> None:
    publisher.fail(503, times=None, after=1)
    runs, outcome = read(publisher, patience=0.05)
    assert numbers(runs) == list(range(50))
    assert (outcome.failed, outcome.ended) == (None, False)


def test_wrong_credentials_are_not_retried(publisher: Publisher) -> None:
    feed = feed_of(publisher)
    _ = feed.info
    publisher.bearer = "x"
    with pytest.raises(AuthenticationError):
        PartitionReader(feed, Target(0, FIRST)).read()


def test_r10_a_new_token_is_fetched_on_the_way(publisher: Publisher) -> None:
    feed = feed_of(publisher)
    _ = feed.info
    publisher.rotate_token()
    runs: list[CheckpointedEvents] = []
    PartitionReader(feed, Target(0, FIRST)).read(runs.append)
    assert numbers(runs) == list(range(100))


def test_r10_a_conflict_that_stays_is_an_error(publisher: Publisher) -> None:
    publisher.fail(409, times=None)
    with pytest.raises(ProtocolError, match="409 again and again"):
        read(publisher)


@pytest.mark.parametrize("status", [400, 404, 410])
def test_r10_another_refusal_is_for_the_driver(publisher: Publisher, status: int) -> None:
    publisher.fail(status, times=None)
    assert read(publisher)[1].refused == status


def test_r10_a_partition_that_is_gone_is_for_the_driver(publisher: Publisher) -> None:
    feed = feed_of(publisher)
    _ = feed.info
    publisher.split(0, into=2, method="cursor-from")
    assert PartitionReader(feed, Target(0, FIRST)).read().refused == 0


@pytest.mark.parametrize("fault", [SameCheckpoint(), NoCheckpoint()])
def test_r13_events_without_a_new_cursor_end_in_an_error(publisher: Publisher, fault: Any) -> None:
    publisher.fail(fault, times=None)
    with pytest.raises(NoProgressError, match="brought events and no new cursor"):
        read(publisher)


def test_r6_empty_pages_that_move_the_cursor_are_not_the_end(publisher: Publisher) -> None:
    publisher.fail(EmptyPage(), times=5)
    assert numbers(read(publisher)[0]) == list(range(100))


def test_r15_a_response_that_is_held_open_comes_to_its_end(publisher: Publisher) -> None:
    publisher.stream = True
    runs, outcome = read(publisher, given={"stream": "50"})
    assert numbers(runs) == list(range(100))
    assert outcome.ended
    assert publisher.requests[-1].query["stream"] == "50"
    publisher.clear_requests()
    read(publisher, given={"stream": "50"}, probe=True)
    assert all("stream" not in request.query for request in publisher.requests)


def test_reading_stops_when_there_is_enough_for_another_reason(publisher: Publisher) -> None:
    _, outcome = read(publisher, full=lambda: True)
    assert 0 < outcome.events < 100


def test_the_end_is_a_cursor_that_can_be_kept(publisher: Publisher) -> None:
    end = read_end(feed_of(publisher), 0)
    publisher.append(0, {"n": 100})
    assert numbers(read(publisher, cursor=end)[0]) == [100]


def test_a_filter_that_the_feed_does_not_offer_is_named(publisher: Publisher) -> None:
    publisher.dialect = "v2-draft"
    with pytest.raises(ProtocolError, match="does not offer filter 'colour'"):
        feed_of(publisher, **{"filter.colour": "red"}).discover()


def test_a_filter_that_fits_two_names_is_refused(publisher: Publisher) -> None:
    publisher.dialect = "v2-draft"
    publisher.filters = {
        "Subject": lambda payload, value: True,
        "subject": lambda payload, value: True,
    }
    with pytest.raises(OptionError, match="fits several filters"):
        feed_of(publisher, **{"filter.SUBJECT": "x"}).discover()


def test_only_newlines_end_a_line() -> None:
    chunk = b'{"a":"\xe2\x80\xa8\x0c\r\x85"}\n{"b":1}\n{"half'
    assert list(_lines(chunk)) == [b'{"a":"\xe2\x80\xa8\x0c\r\x85"}\n', b'{"b":1}\n', b'{"half']
