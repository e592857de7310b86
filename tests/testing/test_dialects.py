"""What is on the wire: the lines, pages and refusals of each dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client.testing import Publisher, Quirks
from tests.testing.served_feed import ServedFeed, parse

MakeFeed = Callable[..., ServedFeed]
ALL = ["v1", "v2-draft", "v2-token"]
V1, DRAFT, TOKEN = ({"dialect": dialect} for dialect in ALL)
TWENTY = [{"n": n} for n in range(20)]


def test_discovery(make_feed: MakeFeed) -> None:
    partitions = [{"id": "0"}, {"id": "1"}]
    feed = make_feed(2, dialect="v2-draft")
    assert feed.discover() == {"partitions": partitions, "exactlyOnce": True}
    feed.publisher.stream, feed.publisher.filters = True, {"subject": lambda payload, value: True}
    more = {"stream": True, "filters": ["subject"]}
    assert feed.discover() == {"partitions": partitions, "exactlyOnce": True, **more}
    feed = make_feed(2)
    token = {"token": feed.publisher.token}
    assert feed.discover() == {**token, "partitions": partitions, "exactlyOnce": True}


@pytest.mark.parametrize(
    ("dialect", "quirks", "lines"),
    [
        ("v1", {}, '{"partition":0,"headers":{},"data":{"n":1}}\n{"partition":0,"cursor":"C"}\n'),
        ("v2-draft", {}, '{"event":{"n":1}}\n{"cursor":"C"}\n'),
        ("v2-token", {}, '{"data":{"n":1}}\n{"cursor":"C"}\n'),
        ("v2-draft", {"swapped_payload_key": True}, '{"data":{"n":1}}\n{"cursor":"C"}\n'),
        ("v2-token", {"swapped_payload_key": True}, '{"event":{"n":1}}\n{"cursor":"C"}\n'),
        ("v2-draft", {"pascal_case": True}, '{"Event":{"n":1}}\n{"Cursor":"C"}\n'),
        ("v2-token", {"pascal_case": True}, '{"Data":{"n":1}}\n{"Cursor":"C"}\n'),
    ],
)
def test_lines(make_feed: MakeFeed, dialect: str, quirks: dict[str, bool], lines: str) -> None:
    feed = make_feed(dialect=dialect, quirks=Quirks(**quirks))  # type: ignore[arg-type]
    cursor = feed.publisher.append(0, {"n": 1})
    assert feed.fetch().text == lines.replace("C", cursor).replace(cursor + "ursor", "Cursor")


@pytest.mark.parametrize(
    ("asked", "headers"),
    [({"headers": "_all"}, '{"a":"1","b":"2"}'), ({"headers": "a,c"}, '{"a":"1"}'), ({}, "{}")],
)
def test_v1_headers_of_the_request_are_included(
    make_feed: MakeFeed, asked: dict[str, str], headers: str
) -> None:
    feed = make_feed(dialect="v1")
    feed.publisher.append(0, {"n": 1}, headers={"a": "1", "b": "2"})
    line = f'{{"partition":0,"headers":{headers},"data":{{"n":1}}}}\n'
    assert feed.fetch(**asked).text.startswith(line)


@pytest.mark.parametrize("dialect", ALL)
def test_payload_bytes_are_sent_verbatim(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(dialect=dialect)
    raw = '{ "ä" : 12345678901234567890.10, "s":"a\u2028b\u0085c\\r" }'.encode()
    feed.publisher.append(0, raw)
    feed.publisher.append(0, "text")
    content = feed.fetch().content
    assert raw in content
    assert b':"text"}\n' in content


# Pages and cursors


@pytest.mark.parametrize("dialect", ALL)
def test_pages_and_checkpoints(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(dialect=dialect, page_size=7, checkpoint_every=3)
    feed.publisher.extend(0, TWENTY)
    assert [len(events) for events, _ in parse(feed.fetch().text)] == [3, 3, 1]
    assert feed.read_all() == TWENTY


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize(
    ("style", "status", "answers"),
    [
        ("cursor", 200, {"_first": "end", "_last": "end", "end": "end"}),
        ("echo", 200, {"_first": "_first", "_last": "_last", "end": "end"}),
        ("silent", 200, {"_first": None, "_last": None, "end": None}),
        ("204", 204, {"_first": None, "_last": None, "end": None}),
    ],
)
def test_what_an_empty_page_holds(
    make_feed: MakeFeed, dialect: str, style: Any, status: int, answers: dict[str, str | None]
) -> None:
    feed = make_feed(dialect=dialect, quirks=Quirks(empty_page=style))

    def check(asked: str, end: str) -> None:
        response = feed.fetch(0, asked.replace("end", end))
        answer = answers[asked]
        assert response.status_code == status
        if answer is None:
            assert response.content == b""
        else:
            assert parse(response.text) == [([], answer.replace("end", end))]

    empty = feed.publisher.end_cursor(0)
    for asked in ("_first", "_last", "end"):
        check(asked, empty)
    end = feed.publisher.append(0, {"n": 1})
    for cursor in ("_first", empty):
        assert feed.read(0, cursor) == ([{"n": 1}], end)
    for asked in ("_last", "end"):
        check(asked, end)


@pytest.mark.parametrize(
    ("style", "at_end"), [("cursor", "C"), ("echo", "C"), ("silent", ""), ("204", "")]
)
def test_an_empty_page_still_leads_to_the_last_cursor(
    make_feed: MakeFeed, style: Any, at_end: str
) -> None:
    feed = make_feed(quirks=Quirks(empty_page=style, last_cursor="closed"))
    feed.publisher.close(0)
    end = feed.publisher.end_cursor(0)
    assert feed.read(0, "_first") == ([], end)
    assert feed.fetch(0, end).text == at_end.replace("C", f'{{"cursor":"{end}"}}\n')


def test_internal_events_move_the_cursor_without_an_event(make_feed: MakeFeed) -> None:
    feed = make_feed(quirks=Quirks(empty_page="echo"))
    end = feed.publisher.append_internal(0, 3)
    assert [feed.read(0, cursor) for cursor in ("_first", end)] == [([], end)] * 2
    feed.publisher.append_internal(0, 2200)
    end = feed.publisher.append(0, {"n": 1})
    cursor, pages = "_first", []
    while cursor != end:
        events, cursor = feed.read(cursor=cursor)
        pages.append(events)
    assert pages == [[], [], [{"n": 1}]]


def test_cursors_can_need_percent_encoding(make_feed: MakeFeed) -> None:
    feed = make_feed(quirks=Quirks(awkward_cursors=True), page_size=2)
    feed.publisher.extend(0, TWENTY[:5])
    assert set('%+ &=#"?/') < set(feed.publisher.end_cursor(0))
    assert feed.read_all() == TWENTY[:5]


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("source", ALL)
def test_r2_cursors_carry_over_to_another_dialect(
    make_feed: MakeFeed, source: str, target: Any
) -> None:
    feed = make_feed(2, dialect=source)
    feed.publisher.extend(1, TWENTY[:3])
    cursor = feed.read(1)[1]
    feed.publisher.upgrade(target)
    feed.publisher.append(1, {"n": 3})
    assert feed.read(1, cursor)[0] == [{"n": 3}]


# What arguments choose


@pytest.mark.parametrize(
    ("dialect", "hint", "count"),
    [
        ("v1", "pagesizehint", 4),
        ("v1", "pageSizeHint", 20),
        ("v2-draft", "pageSizeHint", 4),
        ("v2-draft", "pagesizehint", 20),
        ("v2-token", "pagesizehint", 4),
        ("v2-token", "pageSizeHint", 20),
    ],
)
def test_a_page_size_hint_in_the_spelling_of_the_dialect(
    make_feed: MakeFeed, dialect: str, hint: str, count: int
) -> None:
    feed = make_feed(dialect=dialect)
    feed.publisher.extend(0, TWENTY)
    assert feed.read(**{hint: 4})[0] == TWENTY[:count]


TYPED = [{"n": n, **({"type": type} if type else {})} for n, type in enumerate("abc.a")]
COLORS = [{"n": n, "color": "rgb"[n % 3]} for n in range(20)]
ABOVE = {"above": lambda payload, value: payload["n"] > int(value)}


@pytest.mark.parametrize(
    ("settings", "events", "arguments", "numbers"),
    [
        (
            {**DRAFT, "filters": ("color",)},
            COLORS,
            {"filter_color": "g"},
            [1, 4, 7, 10, 13, 16, 19],
        ),
        ({**DRAFT, "filters": ABOVE}, COLORS, {"filter_above": "17"}, [18, 19]),
        (TOKEN, TYPED, {"event_types": "a;b"}, [0, 1, 4]),
        (TOKEN, TYPED, {"skip_event_types": "a;b"}, [2, 3]),
        (
            {**TOKEN, "quirks": Quirks(ignore_event_types=True)},
            TYPED,
            {"event_types": "a"},
            [*range(5)],
        ),
    ],
)
def test_events_that_a_consumer_asks_for(
    make_feed: MakeFeed, settings: Any, events: Any, arguments: Any, numbers: list[int]
) -> None:
    feed = make_feed(page_size=2, **settings)
    feed.publisher.extend(0, events)
    assert feed.numbers(**arguments) == numbers


# What is refused

STREAM = {**DRAFT, "stream": True}
OLD = "?n=1&cursor0=_first"
FETCH = "partition=0&cursor=_first"
EVENTS = "/events?token=TOKEN&"


@pytest.mark.parametrize(
    ("settings", "request_line", "status"),
    [
        (V1, "GET ", 400),
        (V1, f"GET {OLD}", 200),
        (V1, "GET ?n=3&cursor0=_first", 400),
        (V1, "GET ?n=1", 400),
        (V1, f"GET /events?{FETCH}", 404),
        (DRAFT, f"GET ?{FETCH}", 200),
        (DRAFT, f"GET /events?{FETCH}", 404),
        (DRAFT, f"GET {OLD}", 400),
        ({**DRAFT, "quirks": Quirks(answers_v1=True)}, f"GET {OLD}", 200),
        (DRAFT, "GET ?partition=7&cursor=_first", 404),
        (DRAFT, f"GET ?{FETCH}&stream=y", 400),
        (STREAM, f"GET ?{FETCH}&stream=soon", 400),
        (STREAM, f"GET ?{FETCH}&stream=y&pageSizeHint=5", 400),
        ({**DRAFT, "filters": ("subject",)}, f"GET ?{FETCH}&filter-color=red", 400),
        (TOKEN, f"GET {EVENTS}{FETCH}", 200),
        (TOKEN, f"GET /events?token=other&{FETCH}", 409),
        (TOKEN, f"GET {EVENTS}partition=7&cursor=_first", 404),
        (TOKEN, f"GET {EVENTS}{FETCH}&event-types=a&skip-event-types=b", 400),
        (TOKEN, "GET /nothing", 404),
        (TOKEN, "POST ", 405),
    ],
)
def test_which_requests_are_answered(
    make_feed: MakeFeed, settings: Any, request_line: str, status: int
) -> None:
    feed = make_feed(**settings)
    method, _, rest = request_line.partition(" ")
    url = feed.url + rest.replace("TOKEN", feed.publisher.token)
    response = feed.http.request(method, url)
    assert response.status_code == status
    if (settings, rest) == (V1, ""):
        assert response.text.strip() == "handshake error: partition count missing"


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("cursor", ["nonsense", "0123456789abcdef", "ÿ", "_middle", "", "foreign"])
def test_a_cursor_that_is_none_of_the_partition_is_refused(
    make_feed: MakeFeed, dialect: str, cursor: str
) -> None:
    feed = make_feed(2, dialect=dialect)
    foreign = feed.publisher.append(0, {"n": 1})
    assert feed.fetch(1, foreign if cursor == "foreign" else cursor).status_code == 400


@pytest.mark.parametrize(
    ("sent", "status"), [(None, 401), ("Bearer x", 403), ("Bearer right", 200)]
)
def test_a_bearer_token_can_be_required(make_feed: MakeFeed, sent: str | None, status: int) -> None:
    feed = make_feed(bearer="right")
    headers = {} if sent is None else {"authorization": sent}
    assert feed.http.get(feed.url, headers=headers).status_code == status


def test_a_stale_token_is_refused(make_feed: MakeFeed) -> None:
    feed = make_feed()
    url, arguments = feed.request()
    feed.publisher.rotate_token()
    assert feed.http.get(url, params=arguments).status_code == 409
    assert feed.fetch().status_code == 200


def test_a_query_argument_can_be_required(make_feed: MakeFeed) -> None:
    feed = make_feed()
    feed.publisher.require_query = {"tenant": "a b"}
    assert feed.http.get(feed.url).status_code == 403
    assert feed.http.get(feed.url, params={"tenant": "a b"}).status_code == 200


@pytest.mark.parametrize(
    ("partitions", "dialect", "says"), [((1, 5), "v1", r"0\.\.n-1"), (1, "v3", "v2-draft")]
)
def test_a_dialect_that_can_not_be(partitions: Any, dialect: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Publisher(partitions, dialect=dialect)
