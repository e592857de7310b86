"""What a publisher records of its requests, and how many it answers."""

from __future__ import annotations

from collections.abc import Callable

from tests.testing.served_feed import ServedFeed

MakeFeed = Callable[..., ServedFeed]


def test_requests_are_kept_and_counted(make_feed: MakeFeed) -> None:
    feed = make_feed(2)
    feed.discover()
    feed.fetch(1, "_last", pagesizehint=5)
    feed.fetch(7)
    token = feed.publisher.token
    first, second, third = found = feed.publisher.requests
    assert [(each.kind, each.path, each.partition, each.cursor, each.status) for each in found] == [
        ("discovery", "/feed", None, None, 200),
        ("fetch", "/feed/events", 1, "_last", 200),
        ("fetch", "/feed/events", 7, "_first", 404),
    ]
    assert (first.token, second.token) == (None, token)
    assert second.query["pagesizehint"] == "5"
    assert second.headers["host"] in feed.url
    assert first.time <= second.time <= third.time
    counted = {"discovery": 1, "discovery 200": 1, "fetch": 2, "fetch 200": 1, "fetch 404": 1}
    assert feed.publisher.counters == counted
    feed.publisher.clear_requests()
    assert feed.publisher.requests == []


def test_repr_shows_the_state(make_feed: MakeFeed) -> None:
    publisher = make_feed(2).publisher
    publisher.append(1, {})
    publisher.close(1)
    state = "[0: 0 events, 1 closed: 1 events]"
    assert repr(publisher) == f"<Publisher v2-token {publisher.url} {state}>"
