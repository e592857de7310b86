"""What a publisher records of its requests, and how many it answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from feedapi_client.testing import RateLimit
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


@pytest.mark.parametrize(("status", "retry_after"), [(429, None), (503, 7)])
def test_a_rate_limit_refuses_what_is_too_much(
    make_feed: MakeFeed, status: int, retry_after: int | None
) -> None:
    feed = make_feed(2)
    feed.publisher.rate_limit = RateLimit(1e-9, burst=3, status=status, retry_after=retry_after)
    responses = [feed.fetch(n % 2) for n in range(4)] + [feed.http.get(feed.url)]
    assert [response.status_code for response in responses] == [200, 200, 200, status, status]
    wanted = None if retry_after is None else str(retry_after)
    assert responses[-1].headers.get("retry-after") == wanted
    assert feed.publisher.counters["refused"] == 2


def test_a_rate_limit_lets_through_so_many_a_second() -> None:
    limit = RateLimit(2.0, burst=2)
    granted = [limit.refusal(now / 10) is None for now in range(100)]
    assert sum(granted) == 2 + 2 * 10 - 1


def test_a_refused_request_uses_up_no_fault(make_feed: MakeFeed) -> None:
    feed = make_feed()
    feed.publisher.rate_limit = RateLimit(1e-9)
    feed.publisher.fail(404)
    feed.publisher.fail(410)
    assert [feed.fetch().status_code for _ in range(3)] == [404, 429, 429]
    feed.publisher.rate_limit = None
    assert feed.fetch().status_code == 410
