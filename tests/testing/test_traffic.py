from __future__ import annotations

from collections.abc import Callable

from tests.testing.served_feed import ServedFeed

MakeFeed = Callable[..., ServedFeed]


def test_requests_are_kept_and_counted(make_feed: MakeFeed) -> None:
    feed = make_feed(2)
    feed.discover()
    feed.fetch(1, "_last", pagesizehint=5)
    feed.fetch(7)
    first, second, third = feed.publisher.requests
    assert (first.kind, first.partition, first.status) == ("discovery", None, 200)
    assert (second.kind, second.partition, second.cursor, second.token) == (
        "fetch",
        1,
        "_last",
        feed.publisher.token,
    )
    assert second.query["pagesizehint"] == "5"
    assert second.headers["host"] in feed.url
    assert first.time <= second.time <= third.time
    assert (third.status, third.path) == (404, "/feed/events")
    assert feed.publisher.counters == {
        "discovery": 1,
        "discovery 200": 1,
        "fetch": 2,
        "fetch 200": 1,
        "fetch 404": 1,
    }
    feed.publisher.clear_requests()
    assert feed.publisher.requests == []


def test_repr_shows_the_state(make_feed: MakeFeed) -> None:
    publisher = make_feed(2).publisher
    publisher.append(1, {})
    publisher.close(1)
    assert (
        repr(publisher) == f"<Publisher v2-token {publisher.url} [0: 0 events, 1 closed: 1 events]>"
    )
