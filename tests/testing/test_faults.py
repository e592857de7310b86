from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from feedapi_client.testing import Publisher, Request, Response, faults
from tests.testing.feed import Feed, parse

MakeFeed = Callable[..., Feed]


@pytest.fixture(params=["v1", "v2-draft", "v2-token"])
def one(request: pytest.FixtureRequest, feed: MakeFeed) -> Feed:
    """A feed of ten events, a checkpoint behind every second one."""
    found = feed(dialect=request.param, checkpoint_every=2)
    found.publisher.extend(0, [{"n": n} for n in range(10)])
    return found


@pytest.fixture
def token(feed: MakeFeed) -> Feed:
    found = feed(3, checkpoint_every=2)
    found.publisher.extend(0, [{"n": n} for n in range(10)])
    return found


# When faults strike


@pytest.mark.parametrize(
    "status", [400, 401, 403, 404, 408, 409, 410, 425, 429, 500, 502, 503, 504]
)
def test_a_status_strikes_once(token: Feed, status: int) -> None:
    token.publisher.fail(status)
    assert [token.fetch().status_code for _ in range(2)] == [status, 200]


def test_a_fault_strikes_as_often_as_told(token: Feed) -> None:
    rule = token.publisher.fail(503, times=2)
    assert [token.fetch().status_code for _ in range(3)] == [503, 503, 200]
    assert rule.hits == 2
    assert token.publisher.faults == []


def test_a_fault_without_an_end_strikes_until_it_is_removed(token: Feed) -> None:
    rule = token.publisher.fail(503, times=None)
    assert [token.fetch().status_code for _ in range(3)] == [503] * 3
    rule.remove()
    assert token.fetch().status_code == 200


def test_heal_removes_all_faults(token: Feed) -> None:
    token.publisher.fail(503, times=None)
    token.publisher.heal()
    assert token.fetch().status_code == 200


def test_a_fault_spares_the_first_requests(token: Feed) -> None:
    token.publisher.fail(503, after=2)
    assert [token.fetch().status_code for _ in range(4)] == [200, 200, 503, 200]


def test_a_fault_of_one_partition_spares_the_others(token: Feed) -> None:
    token.publisher.fail(503, partition=1)
    assert [token.fetch(id).status_code for id in (0, 1, 2)] == [200, 503, 200]


@pytest.mark.parametrize(
    ("on", "statuses"), [("fetch", [200, 503]), ("discovery", [503, 200]), ("any", [503, 503])]
)
def test_faults_of_discovery_and_of_fetches(token: Feed, on: Any, statuses: list[int]) -> None:
    token.publisher.fail(503, on=on, times=None)
    assert [token.http.get(token.url).status_code, token.fetch().status_code] == statuses


def test_faults_queue_up(token: Feed) -> None:
    for status in (500, 429, 404):
        token.publisher.fail(status)
    assert [token.fetch().status_code for _ in range(4)] == [500, 429, 404, 200]


def test_a_function_is_a_fault(token: Feed) -> None:
    def teapot(response: Response, request: Request, publisher: Publisher) -> Response:
        return Response(418, {"x-partition": str(request.partition)}, b"short and stout")

    token.publisher.fail(teapot)
    response = token.fetch(2)
    assert (response.status_code, response.headers["x-partition"], response.text) == (
        418,
        "2",
        "short and stout",
    )


def test_faults_can_be_combined(token: Feed) -> None:
    token.publisher.fail(faults.Both((faults.NoCheckpoint(), faults.Gzip())))
    response = token.fetch()
    assert response.headers["content-encoding"] == "gzip"
    assert "cursor" not in response.text


# What faults do


def test_status_with_headers_and_body(token: Feed) -> None:
    token.publisher.fail(faults.Status(429, "slow down", {"retry-after": "3"}))
    response = token.fetch()
    assert (response.status_code, response.text, response.headers["retry-after"]) == (
        429,
        "slow down",
        "3",
    )


def test_redirect(token: Feed) -> None:
    token.publisher.fail(faults.Redirect("https://elsewhere.example/feed"))
    response = token.fetch()
    assert (response.status_code, response.headers["location"]) == (
        302,
        "https://elsewhere.example/feed",
    )


def test_html_login_page(token: Feed) -> None:
    token.publisher.fail(faults.Html(), on="discovery")
    response = token.http.get(token.url)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    "value", [{"partitions": [{"id": "70000"}]}, [], None, "text", {"partitions": {}}]
)
def test_discovery_replaced(token: Feed, value: Any) -> None:
    token.publisher.fail(faults.Replace(value), on="discovery")
    assert token.http.get(token.url).json() == value


def test_discovery_edited(token: Feed) -> None:
    token.publisher.fail(
        faults.Edit(lambda found: found["partitions"].append({"id": "0"})), on="discovery"
    )
    assert [partition["id"] for partition in token.discover()["partitions"]] == ["0", "1", "2", "0"]


def test_reset_before_the_response(token: Feed) -> None:
    token.publisher.fail(faults.Reset())
    with pytest.raises(httpx.ReadError, match="reset"):
        token.fetch()
    assert token.fetch().status_code == 200


def test_reset_in_the_middle(one: Feed) -> None:
    one.publisher.fail(faults.Reset(after_lines=4))
    got = received(one)
    assert isinstance(got.error, httpx.ReadError)
    assert got.body.count(b"\n") == 4
    assert not got.body.endswith(b"\n")


@pytest.mark.parametrize("chunked", [False, True])
def test_truncated_body(one: Feed, chunked: bool) -> None:
    one.publisher.fail(faults.Truncate(after_lines=4, chunked=chunked))
    got = received(one)
    assert isinstance(got.error, httpx.RemoteProtocolError)
    assert got.body.count(b"\n") == 4
    assert not got.body.endswith(b"\n")


def test_truncated_after_bytes(one: Feed) -> None:
    one.publisher.fail(faults.Truncate(after_bytes=11))
    assert len(received(one).body) == 11


def test_broken_chunk(one: Feed) -> None:
    one.publisher.fail(faults.BrokenChunk())
    got = received(one)
    assert isinstance(got.error, httpx.RemoteProtocolError)
    assert got.body.endswith(b"\n")


def test_body_cut_in_the_middle_of_a_line(one: Feed) -> None:
    one.publisher.fail(faults.CutLine(after_lines=1))
    first, rest = one.fetch().text.split("\n")
    json.loads(first)
    with pytest.raises(json.JSONDecodeError):
        json.loads(rest)


def test_error_text_in_the_middle_of_a_line(one: Feed) -> None:
    one.publisher.fail(faults.ErrorText())
    response = one.fetch()
    assert response.status_code == 200
    assert response.text.endswith("Internal server error")
    assert response.text.count("\n") == 14


def test_no_final_newline(one: Feed) -> None:
    whole = one.fetch().text
    one.publisher.fail(faults.NoFinalNewline())
    assert one.fetch().text == whole[:-1]


@pytest.mark.parametrize("keep", [0, 2])
def test_no_checkpoint(one: Feed, keep: int) -> None:
    one.publisher.fail(faults.NoCheckpoint(keep))
    batches = parse(one.fetch().text)
    assert [len(events) for events, _ in batches] == [2] * keep + [10 - 2 * keep]
    assert batches[-1][1] is None


def test_checkpoint_equal_to_the_one_asked_with(one: Feed) -> None:
    cursor = parse(one.fetch().text)[0][1]
    assert cursor is not None
    one.publisher.fail(faults.SameCheckpoint())
    assert {then for _, then in parse(one.fetch(0, cursor).text)} == {cursor}


def test_empty_pages_whose_cursor_moves(one: Feed) -> None:
    one.publisher.fail(faults.EmptyPage(), times=3)
    cursors = ["_first"]
    for _ in range(3):
        events, cursor = one.read(0, cursors[-1])
        assert events == []
        cursors.append(cursor)
    assert len(set(cursors)) == 4
    assert len(one.read_all(0, cursors[-1])) == 10


def test_empty_pages_behind_the_last_event_stay_there(one: Feed) -> None:
    one.publisher.fail(faults.EmptyPage())
    cursor = one.read(0, "_last")[1]
    assert one.read(0, cursor)[0] == []


def test_endless_line(one: Feed) -> None:
    one.publisher.fail(faults.EndlessLine())
    body = received(one, limit=1_000_000).body
    assert len(body) >= 1_000_000
    assert body.count(b"\n") == 15


def test_endless_run_without_a_checkpoint(one: Feed) -> None:
    one.publisher.fail(faults.EndlessRun())
    body = received(one, limit=1_000_000).body
    assert body.count(b"\n") > 10_000
    assert b"cursor" not in body


def test_unknown_commands(one: Feed) -> None:
    whole = one.fetch().text
    one.publisher.fail(faults.UnknownCommands())
    text = one.fetch().text
    assert parse(text) == parse(whole)
    assert '{"resync":true,"partition":0}\n{}\n' in text


def test_extra_fields_in_lines(one: Feed) -> None:
    whole = one.fetch().text
    one.publisher.fail(faults.ExtraFields())
    text = one.fetch().text
    assert [{**json.loads(line), "x-before": 0, "x-behind": 0} for line in whole.splitlines()] == [
        {**json.loads(line), "x-before": 0, "x-behind": 0} for line in text.splitlines()
    ]
    assert "x-before" in text


def test_extra_fields_in_discovery(token: Feed) -> None:
    token.publisher.fail(faults.ExtraFields(), on="discovery")
    found = token.discover()
    assert found["x-build"] == {"n": 1}
    assert found["partitions"][0].items() >= {"id": "0", "weight": 0.5}.items()


def test_delay(token: Feed) -> None:
    token.publisher.fail(faults.Delay(0.1))
    started = time.monotonic()
    assert token.fetch().status_code == 200
    assert time.monotonic() - started >= 0.1


def test_hang_without_an_answer(token: Feed) -> None:
    token.publisher.fail(faults.Hang())
    url, arguments = token.request(0, "_first")
    with pytest.raises(httpx.ReadTimeout):
        token.http.get(url, params=arguments, timeout=0.1)


def test_hang_in_the_middle(one: Feed) -> None:
    one.publisher.fail(faults.Hang(after_lines=2))
    got = received(one, timeout=0.5)
    assert isinstance(got.error, httpx.ReadTimeout)
    assert got.body.count(b"\n") == 2


def test_trickle(one: Feed) -> None:
    whole = one.fetch().text
    one.publisher.fail(faults.Trickle())
    assert one.fetch().text == whole


def test_gzip(one: Feed) -> None:
    whole = one.fetch().text
    one.publisher.fail(faults.Gzip())
    response = one.fetch()
    assert response.headers["content-encoding"] == "gzip"
    assert response.text == whole


def test_payloads_survive_extra_fields_byte_for_byte(token: Feed) -> None:
    raw = b'{ "big": 123456789012345678901234567890 }'
    token.publisher.append(1, raw)
    token.publisher.fail(faults.ExtraFields())
    assert raw in token.fetch(1).content


class received:  # noqa: N801
    """The body bytes that came before the end or the error."""

    def __init__(self, feed: Feed, limit: float = float("inf"), timeout: float = 5) -> None:
        self.body = b""
        self.error: httpx.HTTPError | None = None
        url, arguments = feed.request(0, "_first")
        try:
            with feed.http.stream("GET", url, params=arguments, timeout=timeout) as response:
                for piece in response.iter_bytes():
                    self.body += piece
                    if len(self.body) >= limit:
                        return
        except httpx.HTTPError as error:
            self.error = error
