"""When a read looks for its fixed end, and when it gives up, without a publisher."""

from __future__ import annotations

import msgspec
import pytest

from feedapi_client.errors import ProtocolError
from feedapi_client.model import Event
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.spark.fetch import Target
from feedapi_client.spark.fixed_end import EndWatch, MayHoldEnd, finds_no_end, fingerprint


def batch(cursor: str, numbers: range) -> CheckpointedEvents:
    events = [Event(msgspec.Raw(b"%d" % n)) for n in numbers]
    return CheckpointedEvents(events, cursor, 10)


class Feed:
    """A feed of numbers, whose cursors are the number of the next event.

    Its end moves on by `growth` each time that it is asked for.
    """

    def __init__(self, *, growth: int = 0) -> None:
        self.end = 100
        self.growth = growth
        self.asked: list[tuple[str, int]] = []

    def page(self, cursor: str, size: int) -> list[CheckpointedEvents]:
        self.asked.append((cursor, size))
        first = int(cursor)
        return [batch(str(first + size), range(first, first + size))]

    def fingerprints(self, cursor: str, limit: int) -> list[int]:
        first = int(cursor)
        return [fingerprint(msgspec.Raw(b"%d" % n)) for n in range(first, first + limit)]

    def present_end(self) -> str | None:
        self.end += self.growth
        return str(self.end)


def watch_of(feed: Feed, end: str | None, *, resumable: bool = False) -> EndWatch:
    return EndWatch(Target(0, "0", end=end, resumable=resumable), feed, feed="http://a")


def test_a_read_without_an_end_reaches_none() -> None:
    watch = watch_of(Feed(), None)
    watch.check(batch("10", range(10)))
    watch.delivered(batch("10", range(10)))
    watch.response_over("10")
    assert not watch.reached


def test_a_checkpoint_at_the_end_ends_the_read() -> None:
    watch = watch_of(Feed(), "10")
    assert not watch.reached
    watch.delivered(batch("10", range(10)))
    assert watch.reached
    assert watch_of(Feed(), "0").reached  # nothing to read


def test_an_end_within_a_batch_is_found_in_small_pages() -> None:
    feed = Feed()
    watch = watch_of(feed, "13")
    watch.response_over("10")  # learns what comes behind the end
    with pytest.raises(MayHoldEnd) as found:
        watch.check(batch("20", range(10, 20)))
    read = [page for pages in watch.pages_to_end(found.value, "10") for page in pages]
    assert [event.json() for page in read for event in page.events] == [10, 11, 12]
    assert watch.reached
    assert feed.asked == [("10", 3)]


def test_an_end_without_a_checkpoint_gives_way_to_a_later_one() -> None:
    feed = Feed(growth=50)
    feed.page = lambda cursor, size: [batch("20", range(10, 20))]  # type: ignore[method-assign]
    watch = watch_of(feed, "13")
    watch.response_over("10")
    with pytest.raises(MayHoldEnd) as found:
        watch.check(batch("20", range(10, 20)))
    assert list(watch.pages_to_end(found.value, "10")) == []
    assert not watch.reached
    assert feed.end == 150
    watch.check(batch("20", range(10, 20)))  # is delivered now
    watch.delivered(batch("150", range(20, 150)))
    assert watch.reached


class Endless(Feed):
    """Its end stays ahead of the read, and its small pages hold nothing."""

    def page(self, cursor: str, size: int) -> list[CheckpointedEvents]:
        return []


def test_a_read_that_never_finds_an_end_is_refused() -> None:
    feed = Endless()
    watch = watch_of(feed, "13")
    with pytest.raises(ProtocolError, match="availableNow"):
        read_for_ever(watch, feed)


def read_for_ever(watch: EndWatch, feed: Endless) -> None:
    for at in range(10, 10_000, 10):
        feed.end = at + 50
        watch.response_over(str(at))
        try:
            watch.check(batch(str(at + 200), range(at, at + 200)))
        except MayHoldEnd as found:
            for _ in watch.pages_to_end(found, str(at)):
                pass


def test_rounds_that_grow_twice_end_a_read() -> None:
    rounds = [4, 4, 3, 3, 2, 2, 5]  # the first two are not counted
    assert [finds_no_end(rounds[:n]) for n in range(1, 8)] == [False] * 6 + [True]
    assert not finds_no_end([1, 4, 4])
