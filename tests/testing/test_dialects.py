from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from feedapi_client.testing import Publisher, Quirks
from tests.testing.served_feed import ServedFeed, parse

MakeFeed = Callable[..., ServedFeed]
ALL = ["v1", "v2-draft", "v2-token"]
V2 = ["v2-draft", "v2-token"]


def test_v1_answers_an_argument_less_get_with_400(make_feed: MakeFeed) -> None:
    feed = make_feed(dialect="v1")
    response = feed.http.get(feed.url)
    assert (response.status_code, response.text.strip()) == (
        400,
        "handshake error: partition count missing",
    )


def test_draft_discovery_has_no_token(make_feed: MakeFeed) -> None:
    assert make_feed(2, dialect="v2-draft").discover() == {
        "partitions": [{"id": "0"}, {"id": "1"}],
        "exactlyOnce": True,
    }


def test_published_discovery_has_the_token(make_feed: MakeFeed) -> None:
    feed = make_feed(dialect="v2-token")
    assert feed.discover()["token"] == feed.publisher.token


@pytest.mark.parametrize(
    ("dialect", "lines"),
    [
        ("v1", ['{"partition":0,"headers":{},"data":{"n":1}}', '{"partition":0,"cursor":"C"}']),
        ("v2-draft", ['{"event":{"n":1}}', '{"cursor":"C"}']),
        ("v2-token", ['{"data":{"n":1}}', '{"cursor":"C"}']),
    ],
)
def test_lines_of_each_dialect(make_feed: MakeFeed, dialect: str, lines: list[str]) -> None:
    feed = make_feed(dialect=dialect)
    cursor = feed.publisher.append(0, {"n": 1})
    assert feed.fetch().text == "".join(line.replace("C", cursor) + "\n" for line in lines)


@pytest.mark.parametrize("dialect", ALL)
def test_reads_page_by_page_to_the_end(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(dialect=dialect, page_size=7, checkpoint_every=3)
    feed.publisher.extend(0, [{"n": n} for n in range(20)])
    assert [event["n"] for event in feed.read_all()] == list(range(20))


@pytest.mark.parametrize("dialect", ALL)
def test_there_is_a_checkpoint_every_n_events(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(dialect=dialect, page_size=7, checkpoint_every=3)
    feed.publisher.extend(0, [{"n": n} for n in range(20)])
    assert [len(events) for events, _ in parse(feed.fetch().text)] == [3, 3, 1]


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("cursor", ["_first", "_last"])
def test_an_empty_partition_gives_a_real_cursor(
    make_feed: MakeFeed, dialect: str, cursor: str
) -> None:
    feed = make_feed(dialect=dialect)
    events, then = feed.read(cursor=cursor)
    assert events == []
    assert not then.startswith("_")
    feed.publisher.append(0, {"n": 1})
    assert feed.read(cursor=then)[0] == [{"n": 1}]


@pytest.mark.parametrize("dialect", ALL)
def test_at_the_end_the_cursor_is_that_of_the_request(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(dialect=dialect)
    cursor = feed.publisher.append(0, {"n": 1})
    assert feed.read(cursor=cursor) == ([], cursor)


@pytest.mark.parametrize("dialect", ALL)
def test_last_is_after_the_newest_event(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(dialect=dialect)
    cursor = feed.publisher.append(0, {"n": 1})
    assert feed.read(cursor="_last") == ([], cursor)


@pytest.mark.parametrize(
    ("dialect", "hint"),
    [("v1", "pagesizehint"), ("v2-draft", "pageSizeHint"), ("v2-token", "pagesizehint")],
)
def test_page_size_hint_in_the_spelling_of_the_dialect(
    make_feed: MakeFeed, dialect: str, hint: str
) -> None:
    feed = make_feed(dialect=dialect)
    feed.publisher.extend(0, [{"n": n} for n in range(20)])
    other = {"pagesizehint": "pageSizeHint", "pageSizeHint": "pagesizehint"}[hint]
    assert len(feed.read(**{hint: 4})[0]) == 4
    assert len(feed.read(**{other: 4})[0]) == 20


def test_a_stale_token_is_a_409(make_feed: MakeFeed) -> None:
    feed = make_feed()
    url, arguments = feed.request(0, "_first")
    feed.publisher.rotate_token()
    assert feed.http.get(url, params=arguments).status_code == 409
    assert feed.fetch().status_code == 200


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("cursor", ["nonsense", "0123456789abcdef", "ÿ", "_middle", ""])
def test_a_made_up_cursor_is_a_400(make_feed: MakeFeed, dialect: str, cursor: str) -> None:
    assert make_feed(dialect=dialect).fetch(cursor=cursor).status_code == 400


@pytest.mark.parametrize("dialect", ALL)
def test_a_cursor_of_another_partition_is_a_400(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(2, dialect=dialect)
    assert feed.fetch(1, feed.publisher.append(0, {"n": 1})).status_code == 400


@pytest.mark.parametrize("dialect", V2)
def test_an_unknown_partition_is_a_404(make_feed: MakeFeed, dialect: str) -> None:
    assert make_feed(dialect=dialect).fetch(7).status_code == 404


def test_v1_checks_the_partition_count(make_feed: MakeFeed) -> None:
    feed = make_feed(4, dialect="v1")
    assert feed.http.get(feed.url, params={"n": 3, "cursor0": "_first"}).status_code == 400
    assert feed.http.get(feed.url, params={"n": 4}).status_code == 400


def test_only_the_published_dialect_has_an_events_path(make_feed: MakeFeed) -> None:
    for dialect in ("v1", "v2-draft"):
        feed = make_feed(dialect=dialect)
        assert (
            feed.http.get(
                feed.url + "/events", params={"partition": 0, "cursor": "_first"}
            ).status_code
            == 404
        )


def test_other_paths_and_methods_are_refused(make_feed: MakeFeed) -> None:
    feed = make_feed()
    assert feed.http.get(feed.url + "/nothing").status_code == 404
    assert feed.http.post(feed.url).status_code == 405


@pytest.mark.parametrize(
    ("asked", "got"), [("_all", {"a": "1", "b": "2"}), ("a,c", {"a": "1"}), (None, {})]
)
def test_v1_headers_of_the_request_are_included(
    make_feed: MakeFeed, asked: str | None, got: dict[str, str]
) -> None:
    feed = make_feed(dialect="v1")
    feed.publisher.append(0, {"n": 1}, headers={"a": "1", "b": "2"})
    response = feed.fetch(**({"headers": asked} if asked else {}))
    assert json.loads(response.text.split("\n")[0])["headers"] == got


def test_draft_filters_by_a_payload_field(make_feed: MakeFeed) -> None:
    feed = make_feed(dialect="v2-draft", filters=("subject",), page_size=3)
    feed.publisher.extend(0, [{"n": n, "subject": f"s{n % 3}"} for n in range(20)])
    assert [event["n"] for event in feed.read_all(filter_subject="s1")] == [1, 4, 7, 10, 13, 16, 19]
    assert feed.discover()["filters"] == ["subject"]


def test_draft_refuses_an_unsupported_filter(make_feed: MakeFeed) -> None:
    assert (
        make_feed(dialect="v2-draft", filters=("subject",)).fetch(filter_color="red").status_code
        == 400
    )


def test_a_filter_can_be_a_function(make_feed: MakeFeed) -> None:
    feed = make_feed(
        dialect="v2-draft", filters={"above": lambda payload, value: payload["n"] > int(value)}
    )
    feed.publisher.extend(0, [{"n": n} for n in range(5)])
    assert feed.read_all(filter_above="2") == [{"n": 3}, {"n": 4}]


@pytest.mark.parametrize(
    ("argument", "kept"), [("event_types", {"a", "b"}), ("skip_event_types", {"c", None})]
)
def test_event_types(make_feed: MakeFeed, argument: str, kept: set[str | None]) -> None:
    feed = make_feed(page_size=2)
    feed.publisher.extend(0, [{"type": "a"}, {"type": "b"}, {"type": "c"}, {}, {"type": "a"}])
    found = feed.read_all(**{argument: "a;b"})
    assert {event.get("type") for event in found} == kept


def test_both_event_type_arguments_are_a_400(make_feed: MakeFeed) -> None:
    assert make_feed().fetch(event_types="a", skip_event_types="b").status_code == 400


def test_event_types_may_be_ignored(make_feed: MakeFeed) -> None:
    feed = make_feed(quirks=Quirks(ignore_event_types=True))
    feed.publisher.extend(0, [{"type": "a"}, {"type": "b"}])
    assert len(feed.read_all(event_types="a")) == 2


def test_internal_events_move_the_cursor_without_an_event(make_feed: MakeFeed) -> None:
    feed = make_feed()
    feed.publisher.scan_limit = feed.publisher.page_size = 10
    feed.publisher.append_internal(0, 25)
    end = feed.publisher.append(0, {"n": 1})
    cursor, pages = "_first", []
    while cursor != end:
        events, cursor = feed.read(cursor=cursor)
        pages.append(events)
    assert pages == [[], [], [{"n": 1}]]


@pytest.mark.parametrize("dialect", ALL)
def test_payload_bytes_are_sent_verbatim(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(dialect=dialect)
    raw = '{ "ä" : 12345678901234567890.10, "s":"a\u2028b\u0085c\\r" }'.encode()
    feed.publisher.append(0, raw)
    feed.publisher.append(0, "text")
    content = feed.fetch().content
    assert raw in content
    assert b':"text"}\n' in content


def test_cursors_can_need_percent_encoding(make_feed: MakeFeed) -> None:
    feed = make_feed(quirks=Quirks(awkward_cursors=True), page_size=2)
    feed.publisher.extend(0, [{"n": n} for n in range(5)])
    assert set('%+ &=#"?/') < set(feed.publisher.end_cursor(0))
    assert len(feed.read_all()) == 5


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("source", ALL)
def test_r2_cursors_carry_over_to_another_dialect(
    make_feed: MakeFeed, source: str, target: str
) -> None:
    feed = make_feed(2, dialect=source)
    feed.publisher.extend(1, [{"n": n} for n in range(3)])
    cursor = feed.read(1)[1]
    feed.publisher.upgrade(target)
    feed.publisher.append(1, {"n": 3})
    assert feed.read(1, cursor)[0] == [{"n": 3}]


def test_a_v2_publisher_can_still_answer_v1(make_feed: MakeFeed) -> None:
    feed = make_feed(2, dialect="v2-draft")
    assert feed.http.get(feed.url, params={"n": 2, "cursor0": "_first"}).status_code == 400
    feed.publisher.quirks = Quirks(answers_v1=True)
    assert feed.http.get(feed.url, params={"n": 2, "cursor0": "_first"}).status_code == 200


def test_v1_needs_partitions_without_gaps() -> None:
    with pytest.raises(ValueError, match=r"0\.\.n-1"):
        Publisher((1, 5), dialect="v1")


def test_an_unknown_dialect_is_an_error() -> None:
    with pytest.raises(ValueError, match="v2-draft"):
        Publisher(dialect="v3")  # type: ignore[arg-type]


def test_a_bearer_token_can_be_required(make_feed: MakeFeed) -> None:
    feed = make_feed(bearer="right")
    statuses = [
        feed.http.get(feed.url, headers=headers).status_code
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Bearer right"})
    ]
    assert statuses == [401, 403, 200]


def test_a_query_argument_can_be_required(make_feed: MakeFeed) -> None:
    feed = make_feed()
    feed.publisher.require_query = {"tenant": "a b"}
    assert feed.http.get(feed.url).status_code == 403
    assert feed.http.get(feed.url, params={"tenant": "a b"}).status_code == 200
