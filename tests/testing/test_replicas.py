"""`Lag`: what a replica answers that is some seconds behind, in events and in topology."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client.testing import faults
from tests.testing.conftest import Clock
from tests.testing.served_feed import ServedFeed, parse

MakeFeed = Callable[..., ServedFeed]


@pytest.mark.parametrize(
    ("ahead", "status", "answer"),
    [("echo", 200, "end"), ("tail", 200, "tail"), ("silent", 200, None), ("refused", 400, None)],
)
def test_a_replica_lacks_the_newest_events(
    make_feed: MakeFeed, ahead: Any, status: int, answer: str | None
) -> None:
    feed = make_feed()
    feed.publisher.clock = clock = Clock()
    tail = feed.publisher.extend(0, [{"n": 1}, {"n": 2}])
    clock.now += 10
    end = feed.publisher.append(0, {"n": 3})
    feed.publisher.fail(faults.Lag(5.0, ahead), times=None)
    assert feed.read() == ([{"n": 1}, {"n": 2}], tail)
    response = feed.fetch(0, end)
    line = "" if answer is None else f'{{"cursor":"{tail if answer == "tail" else end}"}}\n'
    assert response.status_code == status
    assert status == 400 or response.text == line
    clock.now += 5
    assert feed.read()[0] == [{"n": 1}, {"n": 2}, {"n": 3}]
    feed.publisher.heal()
    assert feed.read(0, tail) == ([{"n": 3}], end)


@pytest.mark.parametrize("ahead", ["echo", "tail"])  # the others name no place
def test_no_answer_of_a_replica_is_past_what_was_read(make_feed: MakeFeed, ahead: Any) -> None:
    feed = make_feed(vary=True, checkpoint_every=2)
    feed.publisher.clock = clock = Clock()
    for n in range(12):
        clock.now += 1.0
        feed.publisher.publish(f"e{n % 7}", {"n": n})
    read: list[int] = []
    batches = parse(feed.fetch().text)
    feed.publisher.vary = False
    for events, cursor in batches:
        if cursor is None:
            break
        read += [event["n"] for event in events]
        for behind in range(12):
            feed.publisher.fail(faults.Lag(behind, ahead), times=1)
            some, answered = feed.read(0, cursor)
            rest = feed.read_all(0, answered)
            assert {*read, *(event["n"] for event in some + rest)} == {*range(12)}, behind


def test_a_replica_lists_an_older_topology(make_feed: MakeFeed) -> None:
    feed = make_feed(2)
    feed.publisher.clock = clock = Clock()
    before = feed.discover()
    clock.now += 10
    feed.publisher.split(0, (2, 3))
    feed.publisher.split(1, (4,), method="cursor-from")
    feed.publisher.fail(faults.Lag(5.0), on="any", times=2)
    assert feed.discover() == before
    assert feed.fetch(2).status_code == 409
    assert {entry["id"] for entry in feed.partitions} == {"0", "2", "3", "4"}


def test_a_stream_of_a_replica_stays_behind(make_feed: MakeFeed) -> None:
    feed = make_feed(dialect="v2-draft", stream=True)
    feed.publisher.clock = clock = Clock()
    cursors = [feed.publisher.append(0, {"n": 0})]
    clock.now += 10
    cursors.append(feed.publisher.append(0, {"n": 1}))
    feed.publisher.fail(faults.Lag(5.0))
    with feed.stream() as lines:
        assert [next(lines), next(lines)] == [{"event": {"n": 0}}, {"cursor": cursors[0]}]
        clock.now += 5
        assert [next(lines), next(lines)] == [{"event": {"n": 1}}, {"cursor": cursors[1]}]


def test_what_a_publisher_was_made_with_is_on_every_replica(make_feed: MakeFeed) -> None:
    feed = make_feed(2)
    before = feed.discover()
    feed.publisher.fail(faults.Lag(1e9), on="any")
    assert feed.discover() == before
