"""Responses that are held open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client.testing import Publisher, faults
from tests.testing.served_feed import ServedFeed

MakeFeed = Callable[..., ServedFeed]


@pytest.fixture
def draft(make_feed: MakeFeed) -> Callable[..., ServedFeed]:
    """Make a feed of dialect v2-draft that offers streams."""
    return lambda *args, **settings: make_feed(*args, dialect="v2-draft", stream=True, **settings)


def test_a_streamed_response_begins_with_what_there_is(draft: MakeFeed) -> None:
    feed = draft(page_size=2, checkpoint_every=2)
    feed.publisher.extend(0, [{"n": n} for n in range(5)])
    with feed.stream() as lines:
        found = [next(lines) for _ in range(8)]
    assert [line["event"]["n"] for line in found if "event" in line] == list(range(5))


def test_events_are_delivered_as_they_are_appended(draft: MakeFeed) -> None:
    feed = draft()
    with feed.stream() as lines:
        assert list(next(lines)) == ["cursor"]
        for n in range(3):
            cursor = feed.publisher.append(0, {"n": n})
            assert next(lines) == {"event": {"n": n}}
            assert next(lines) == {"cursor": cursor}


def appended_and_closed(publisher: Publisher) -> list[Any]:
    cursor = publisher.append(0, {"n": 1})
    publisher.close(0)
    return [{"event": {"n": 1}}, {"cursor": cursor}]


def removed(publisher: Publisher) -> list[Any]:
    publisher.split(0, method="cursor-from")
    return []


@pytest.mark.parametrize(
    ("stream", "change"),
    [
        (100, lambda publisher: []),
        ("y", appended_and_closed),
        ("y", removed),
    ],
    ids=["time", "closed", "removed"],
)
def test_a_stream_ends(draft: MakeFeed, stream: object, change: Any) -> None:
    feed = draft()
    with feed.stream(stream) as lines:
        assert list(next(lines)) == ["cursor"]
        left = change(feed.publisher)
        assert list(lines) == left


def test_faults_apply_to_streams_too(draft: MakeFeed) -> None:
    feed = draft()
    feed.publisher.append(0, {"n": 1})
    feed.publisher.fail(faults.UnknownCommands(({"what": 1},)))
    with feed.stream() as lines:
        assert [next(lines) for _ in range(2)] == [{"what": 1}, {"event": {"n": 1}}]
        next(lines)
        next(lines)
        feed.publisher.append(0, {"n": 2})
        assert [next(lines) for _ in range(2)] == [{"what": 1}, {"event": {"n": 2}}]


def test_a_fault_of_the_body_ends_a_stream_after_its_first_lines(draft: MakeFeed) -> None:
    feed = draft()
    cursor = feed.publisher.append(0, {"n": 1})
    feed.publisher.fail(faults.Gzip())
    with feed.stream() as lines:
        assert list(lines) == [{"event": {"n": 1}}, {"cursor": cursor}]
