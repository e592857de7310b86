from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from feedapi_client.testing import Publisher, Request, Response, faults
from tests.testing.served_feed import ServedFeed, parse

MakeFeed = Callable[..., ServedFeed]


@pytest.fixture(params=["v1", "v2-draft", "v2-token"])
def feed(request: pytest.FixtureRequest, make_feed: MakeFeed) -> ServedFeed:
    """A feed of ten events in each dialect, with a checkpoint after every second event."""
    found = make_feed(dialect=request.param, checkpoint_every=2)
    found.publisher.extend(0, [{"n": n} for n in range(10)])
    return found


@pytest.fixture
def token_feed(make_feed: MakeFeed) -> ServedFeed:
    found = make_feed(3, checkpoint_every=2)
    found.publisher.extend(0, [{"n": n} for n in range(10)])
    return found


# When faults apply


@pytest.mark.parametrize(
    "status", [400, 401, 403, 404, 408, 409, 410, 425, 429, 500, 502, 503, 504]
)
def test_a_status_applies_once(token_feed: ServedFeed, status: int) -> None:
    token_feed.publisher.fail(status)
    assert [token_feed.fetch().status_code for _ in range(2)] == [status, 200]


def test_a_fault_applies_to_the_given_number_of_requests(token_feed: ServedFeed) -> None:
    rule = token_feed.publisher.fail(503, times=2)
    assert [token_feed.fetch().status_code for _ in range(3)] == [503, 503, 200]
    assert rule.hits == 2
    assert token_feed.publisher.faults == []


def test_an_endless_fault_applies_until_it_is_removed(token_feed: ServedFeed) -> None:
    rule = token_feed.publisher.fail(503, times=None)
    assert [token_feed.fetch().status_code for _ in range(3)] == [503] * 3
    rule.remove()
    assert token_feed.fetch().status_code == 200


def test_heal_removes_all_faults(token_feed: ServedFeed) -> None:
    token_feed.publisher.fail(503, times=None)
    token_feed.publisher.heal()
    assert token_feed.fetch().status_code == 200


def test_a_fault_can_skip_the_first_requests(token_feed: ServedFeed) -> None:
    token_feed.publisher.fail(503, after=2)
    assert [token_feed.fetch().status_code for _ in range(4)] == [200, 200, 503, 200]


def test_a_fault_can_apply_to_one_partition(token_feed: ServedFeed) -> None:
    token_feed.publisher.fail(503, partition=1)
    assert [token_feed.fetch(id).status_code for id in (0, 1, 2)] == [200, 503, 200]


@pytest.mark.parametrize(
    ("on", "statuses"), [("fetch", [200, 503]), ("discovery", [503, 200]), ("any", [503, 503])]
)
def test_a_fault_can_apply_to_discovery_or_fetches(
    token_feed: ServedFeed, on: Any, statuses: list[int]
) -> None:
    token_feed.publisher.fail(503, on=on, times=None)
    assert [
        token_feed.http.get(token_feed.url).status_code,
        token_feed.fetch().status_code,
    ] == statuses


def test_faults_apply_one_after_the_other(token_feed: ServedFeed) -> None:
    for status in (500, 429, 404):
        token_feed.publisher.fail(status)
    assert [token_feed.fetch().status_code for _ in range(4)] == [500, 429, 404, 200]


def test_a_function_is_a_fault(token_feed: ServedFeed) -> None:
    def teapot(response: Response, request: Request, publisher: Publisher) -> Response:
        return Response(418, {"x-partition": str(request.partition)}, b"short and stout")

    token_feed.publisher.fail(teapot)
    response = token_feed.fetch(2)
    assert (response.status_code, response.headers["x-partition"], response.text) == (
        418,
        "2",
        "short and stout",
    )


def test_faults_can_be_combined(token_feed: ServedFeed) -> None:
    token_feed.publisher.fail(faults.Both((faults.NoCheckpoint(), faults.Gzip())))
    response = token_feed.fetch()
    assert response.headers["content-encoding"] == "gzip"
    assert "cursor" not in response.text


# What faults do


def test_status_with_headers_and_body(token_feed: ServedFeed) -> None:
    token_feed.publisher.fail(faults.Status(429, "slow down", {"retry-after": "3"}))
    response = token_feed.fetch()
    assert (response.status_code, response.text, response.headers["retry-after"]) == (
        429,
        "slow down",
        "3",
    )


def test_redirect(token_feed: ServedFeed) -> None:
    token_feed.publisher.fail(faults.Redirect("https://elsewhere.example/feed"))
    response = token_feed.fetch()
    assert (response.status_code, response.headers["location"]) == (
        302,
        "https://elsewhere.example/feed",
    )


def test_html_login_page(token_feed: ServedFeed) -> None:
    token_feed.publisher.fail(faults.Html(), on="discovery")
    response = token_feed.http.get(token_feed.url)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    "value", [{"partitions": [{"id": "70000"}]}, [], None, "text", {"partitions": {}}]
)
def test_discovery_replaced(token_feed: ServedFeed, value: Any) -> None:
    token_feed.publisher.fail(faults.Replace(value), on="discovery")
    assert token_feed.http.get(token_feed.url).json() == value


def test_discovery_edited(token_feed: ServedFeed) -> None:
    token_feed.publisher.fail(
        faults.Edit(lambda found: found["partitions"].append({"id": "0"})), on="discovery"
    )
    assert [partition["id"] for partition in token_feed.discover()["partitions"]] == [
        "0",
        "1",
        "2",
        "0",
    ]


def test_reset_before_the_response(token_feed: ServedFeed) -> None:
    token_feed.publisher.fail(faults.Reset())
    with pytest.raises(httpx.ReadError, match="reset"):
        token_feed.fetch()
    assert token_feed.fetch().status_code == 200


def test_reset_in_the_middle(feed: ServedFeed) -> None:
    feed.publisher.fail(faults.Reset(after_lines=4))
    got = Received(feed)
    assert isinstance(got.error, httpx.ReadError)
    assert got.body.count(b"\n") == 4
    assert not got.body.endswith(b"\n")


@pytest.mark.parametrize("chunked", [False, True])
def test_truncated_body(feed: ServedFeed, chunked: bool) -> None:
    feed.publisher.fail(faults.Truncate(after_lines=4, chunked=chunked))
    got = Received(feed)
    assert isinstance(got.error, httpx.RemoteProtocolError)
    assert got.body.count(b"\n") == 4
    assert not got.body.endswith(b"\n")


def test_truncated_after_bytes(feed: ServedFeed) -> None:
    feed.publisher.fail(faults.Truncate(after_bytes=11))
    assert len(Received(feed).body) == 11


def test_broken_chunk(feed: ServedFeed) -> None:
    feed.publisher.fail(faults.BrokenChunk())
    got = Received(feed)
    assert isinstance(got.error, httpx.RemoteProtocolError)
    assert got.body.endswith(b"\n")


def test_body_cut_in_the_middle_of_a_line(feed: ServedFeed) -> None:
    feed.publisher.fail(faults.CutLine(after_lines=1))
    first, rest = feed.fetch().text.split("\n")
    json.loads(first)
    with pytest.raises(json.JSONDecodeError):
        json.loads(rest)


def test_error_text_in_the_middle_of_a_line(feed: ServedFeed) -> None:
    feed.publisher.fail(faults.ErrorText())
    response = feed.fetch()
    assert response.status_code == 200
    assert response.text.endswith("Internal server error")
    assert response.text.count("\n") == 14


def test_no_final_newline(feed: ServedFeed) -> None:
    whole = feed.fetch().text
    feed.publisher.fail(faults.NoFinalNewline())
    assert feed.fetch().text == whole[:-1]


@pytest.mark.parametrize("keep", [0, 2])
def test_no_checkpoint(feed: ServedFeed, keep: int) -> None:
    feed.publisher.fail(faults.NoCheckpoint(keep))
    batches = parse(feed.fetch().text)
    assert [len(events) for events, _ in batches] == [2] * keep + [10 - 2 * keep]
    assert batches[-1][1] is None


def test_checkpoint_equal_to_the_one_asked_with(feed: ServedFeed) -> None:
    cursor = parse(feed.fetch().text)[0][1]
    assert cursor is not None
    feed.publisher.fail(faults.SameCheckpoint())
    assert {then for _, then in parse(feed.fetch(0, cursor).text)} == {cursor}


def test_empty_pages_whose_cursor_moves(feed: ServedFeed) -> None:
    feed.publisher.fail(faults.EmptyPage(), times=3)
    cursors = ["_first"]
    for _ in range(3):
        events, cursor = feed.read(0, cursors[-1])
        assert events == []
        cursors.append(cursor)
    assert len(set(cursors)) == 4
    assert len(feed.read_all(0, cursors[-1])) == 10


def test_an_empty_page_at_the_end_stays_at_the_end(feed: ServedFeed) -> None:
    feed.publisher.fail(faults.EmptyPage())
    cursor = feed.read(0, "_last")[1]
    assert feed.read(0, cursor)[0] == []


def test_endless_line(feed: ServedFeed) -> None:
    feed.publisher.fail(faults.EndlessLine())
    body = Received(feed, limit=1_000_000).body
    assert len(body) >= 1_000_000
    assert body.count(b"\n") == 15


def test_endless_events_without_a_checkpoint(feed: ServedFeed) -> None:
    feed.publisher.fail(faults.EndlessRun())
    body = Received(feed, limit=1_000_000).body
    assert body.count(b"\n") > 10_000
    assert b"cursor" not in body


def test_unknown_commands(feed: ServedFeed) -> None:
    whole = feed.fetch().text
    feed.publisher.fail(faults.UnknownCommands())
    text = feed.fetch().text
    assert parse(text) == parse(whole)
    assert '{"resync":true,"partition":0}\n{}\n' in text


def test_extra_fields_in_lines(feed: ServedFeed) -> None:
    whole = feed.fetch().text
    feed.publisher.fail(faults.ExtraFields())
    text = feed.fetch().text
    assert [{**json.loads(line), "x-before": 0, "x-behind": 0} for line in whole.splitlines()] == [
        {**json.loads(line), "x-before": 0, "x-behind": 0} for line in text.splitlines()
    ]
    assert "x-before" in text


def test_extra_fields_in_discovery(token_feed: ServedFeed) -> None:
    token_feed.publisher.fail(faults.ExtraFields(), on="discovery")
    found = token_feed.discover()
    assert found["x-build"] == {"n": 1}
    assert found["partitions"][0].items() >= {"id": "0", "weight": 0.5}.items()


def test_a_response_hangs_in_the_middle_of_its_body(feed: ServedFeed) -> None:
    feed.publisher.fail(faults.Hang(after_lines=2))
    url, arguments = feed.request(0, "_first")
    body = b""
    with feed.http.stream("GET", url, params=arguments) as response:
        pieces = response.iter_bytes()
        while body.count(b"\n") < 2 or body.endswith(b"\n"):
            body += next(pieces)
        assert feed.publisher.in_flight == 1


def test_trickle(feed: ServedFeed) -> None:
    whole = feed.fetch().text
    feed.publisher.fail(faults.Trickle())
    assert feed.fetch().text == whole


def test_gzip(feed: ServedFeed) -> None:
    whole = feed.fetch().text
    feed.publisher.fail(faults.Gzip())
    response = feed.fetch()
    assert response.headers["content-encoding"] == "gzip"
    assert response.text == whole


def test_payloads_survive_extra_fields_byte_for_byte(token_feed: ServedFeed) -> None:
    raw = b'{ "big": 123456789012345678901234567890 }'
    token_feed.publisher.append(1, raw)
    token_feed.publisher.fail(faults.ExtraFields())
    assert raw in token_feed.fetch(1).content


class Received:
    """The part of the body that arrived, and the error that ended it."""

    def __init__(self, feed: ServedFeed, limit: float = float("inf")) -> None:
        self.body = b""
        self.error: httpx.HTTPError | None = None
        url, arguments = feed.request(0, "_first")
        try:
            with feed.http.stream("GET", url, params=arguments) as response:
                for piece in response.iter_bytes():
                    self.body += piece
                    if len(self.body) >= limit:
                        return
        except httpx.HTTPError as error:
            self.error = error
