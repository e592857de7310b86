"""What real publishers, their replicas and the gateways in front of them do to a consumer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client.testing import Publisher, Quirks, RateLimit, faults
from tests.testing.served_feed import PlainConsumer, ServedFeed, parse

MakeFeed = Callable[..., ServedFeed]
ALL = ["v1", "v2-draft", "v2-token"]
V2 = ["v2-draft", "v2-token"]


# What an empty page holds


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("asked", ["_first", "_last", "end"])
def test_an_empty_page_echoes_the_cursor(make_feed: MakeFeed, dialect: str, asked: str) -> None:
    feed = make_feed(dialect=dialect, quirks=Quirks(empty_page="echo"))
    end = feed.publisher.end_cursor(0)
    cursor = end if asked == "end" else asked
    assert feed.read(0, cursor) == ([], cursor)


@pytest.mark.parametrize("dialect", ALL)
def test_a_page_with_events_echoes_nothing(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(dialect=dialect, quirks=Quirks(empty_page="echo"))
    end = feed.publisher.append(0, {"n": 1})
    assert feed.read(0, "_first") == ([{"n": 1}], end)
    assert feed.read(0, "_last") == ([], "_last")


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize(("style", "status"), [("silent", 200), ("204", 204)])
def test_an_empty_page_has_no_line(
    make_feed: MakeFeed, dialect: str, style: Any, status: int
) -> None:
    feed = make_feed(dialect=dialect, quirks=Quirks(empty_page=style))
    end = feed.publisher.append(0, {"n": 1})
    assert feed.read(0)[0] == [{"n": 1}]
    for cursor in (end, "_last"):
        response = feed.fetch(0, cursor)
        assert (response.status_code, response.content) == (status, b"")


@pytest.mark.parametrize("style", ["echo", "silent", "204"])
def test_an_empty_page_still_leads_to_the_last_cursor(make_feed: MakeFeed, style: Any) -> None:
    quirks = Quirks(empty_page=style, last_cursor="closed")
    feed = make_feed(quirks=quirks)
    feed.publisher.close(0)
    end = feed.publisher.end_cursor(0)
    assert feed.read(0, "_first") == ([], end)
    assert feed.fetch(0, end).text in ("", f'{{"cursor":"{end}"}}\n')


def test_internal_events_move_the_cursor_of_a_page_that_would_be_empty(make_feed: MakeFeed) -> None:
    feed = make_feed(quirks=Quirks(empty_page="echo"))
    end = feed.publisher.append_internal(0, 3)
    assert feed.read(0, "_first") == ([], end)
    assert feed.read(0, end) == ([], end)


# How lines and discovery are written


@pytest.mark.parametrize(("dialect", "key"), [("v2-draft", "data"), ("v2-token", "event")])
def test_the_payload_is_under_the_key_of_the_other_dialect(
    make_feed: MakeFeed, dialect: str, key: str
) -> None:
    feed = make_feed(dialect=dialect, quirks=Quirks(swapped_payload_key=True))
    end = feed.publisher.append(0, {"n": 1})
    assert [json.loads(line) for line in feed.fetch().text.splitlines()] == [
        {key: {"n": 1}},
        {"cursor": end},
    ]


@pytest.mark.parametrize(("dialect", "key"), [("v2-draft", "Event"), ("v2-token", "Data")])
def test_keys_in_pascal_case(make_feed: MakeFeed, dialect: str, key: str) -> None:
    feed = make_feed(dialect=dialect, quirks=Quirks(pascal_case=True))
    end = feed.publisher.append(0, {"n": 1})
    assert feed.fetch().text == f'{{"{key}":{{"n":1}}}}\n{{"Cursor":"{end}"}}\n'


@pytest.mark.parametrize(
    ("quirks", "left"),
    [(Quirks(omit_parent_zero=True), {3: "1"}), (Quirks(omit_starts_after=True), {})],
)
def test_edges_are_left_out(make_feed: MakeFeed, quirks: Quirks, left: dict[int, str]) -> None:
    feed = make_feed(2, quirks=quirks)
    feed.publisher.split(0, (2,))
    feed.publisher.split(1, (3,))
    found = feed.discover()["partitions"]
    assert {
        int(entry["id"]): entry["startsAfterPartition"]
        for entry in found
        if "startsAfterPartition" in entry
    } == left


@pytest.mark.parametrize(("null", "listed"), [(True, None), (False, [])])
def test_a_discovery_without_partitions(make_feed: MakeFeed, null: bool, listed: Any) -> None:
    feed = make_feed()
    feed.publisher.fail(faults.NoPartitions(null), on="discovery")
    assert feed.discover()["partitions"] == listed
    assert len(feed.discover()["partitions"]) == 1


# Replicas that lag


@pytest.fixture
def lagging(make_feed: MakeFeed) -> ServedFeed:
    """A feed that had two events for a while, and has got a third one just now."""
    feed = make_feed()
    feed.publisher.extend(0, [{"n": 1}, {"n": 2}])
    time.sleep(0.3)
    feed.publisher.append(0, {"n": 3})
    return feed


@pytest.mark.parametrize("ahead", ["echo", "tail", "silent", "refused"])
def test_a_replica_lacks_the_newest_events(lagging: ServedFeed, ahead: Any) -> None:
    lagging.publisher.fail(faults.Lag(0.15, ahead), times=None)
    events, cursor = lagging.read()
    assert [event["n"] for event in events] == [1, 2]
    lagging.publisher.heal()
    assert lagging.read(0, cursor)[0] == [{"n": 3}]


@pytest.mark.parametrize("ahead", ["echo", "tail", "silent", "refused"])
def test_how_a_replica_answers_a_cursor_ahead_of_it(lagging: ServedFeed, ahead: Any) -> None:
    end, tail = lagging.read()[1], lagging.publisher.replica(0.15).end_cursor(0)
    lagging.publisher.fail(faults.Lag(0.15, ahead), times=None)
    response = lagging.fetch(0, end)
    answers = {"echo": f'{{"cursor":"{end}"}}\n', "tail": f'{{"cursor":"{tail}"}}\n', "silent": ""}
    assert tail != end
    assert response.status_code == (400 if ahead == "refused" else 200)
    assert response.text == answers.get(ahead, response.text)


@pytest.mark.parametrize("ahead", ["echo", "tail"])  # the others name no place
def test_no_answer_of_a_replica_is_past_what_was_read(
    make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch, ahead: Any
) -> None:
    """A page may hold late events of one entity, and none of another one."""
    now = 0.0
    for module in ("feed", "topology", "partition_log"):
        name = f"feedapi_client.testing.publisher.{module}.monotonic"
        monkeypatch.setattr(name, lambda: now)
    feed = make_feed(vary=True, checkpoint_every=2)
    for n in range(12):
        now += 1.0
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


def test_a_replica_catches_up(lagging: ServedFeed) -> None:
    lagging.publisher.fail(faults.Lag(0.15), times=None)
    deadline = time.monotonic() + 20
    while [event["n"] for event in lagging.read()[0]] != [1, 2, 3]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_replica_lists_an_older_topology(make_feed: MakeFeed) -> None:
    feed = make_feed(2)
    token = feed.publisher.token
    time.sleep(0.3)
    feed.publisher.split(0, (2, 3))
    feed.publisher.split(1, (4,), method="cursor-from")
    feed.publisher.fail(faults.Lag(0.15), on="any", times=2)
    found = feed.discover()
    assert [(entry["id"], entry.get("closed")) for entry in found["partitions"]] == [
        ("0", None),
        ("1", None),
    ]
    assert found["token"] == token
    assert feed.fetch(2).status_code == 409
    assert {entry["id"] for entry in feed.discover()["partitions"]} == {"0", "2", "3", "4"}


def test_what_a_publisher_was_made_with_is_on_every_replica() -> None:
    publisher = Publisher(partitions=2)
    assert list(publisher.replica(60.0).partitions) == [0, 1]
    assert publisher.replica(60.0).token == publisher.token


# Gateways, for a while


@pytest.mark.parametrize(
    ("fault", "body"),
    [
        (faults.Maintenance(), b'{"status":"maintenance"}'),
        (faults.Maintenance({"message": "soon"}), b'{"message":"soon"}'),
        (faults.Empty(), b""),
    ],
)
def test_a_gateway_answers_everything(make_feed: MakeFeed, fault: Any, body: bytes) -> None:
    feed = make_feed()
    feed.publisher.append(0, {"n": 1})
    feed.publisher.fail(fault, on="any", times=None)
    for response in (feed.http.get(feed.url), feed.fetch()):
        assert (response.status_code, response.content) == (200, body)


def test_a_redirect_drops_the_query(make_feed: MakeFeed) -> None:
    feed = make_feed()
    feed.publisher.append(0, {"n": 1})
    feed.publisher.fail(faults.DroppedQuery())
    assert feed.fetch().json() == feed.discover()


def test_a_fault_lasts_for_some_seconds(make_feed: MakeFeed) -> None:
    feed = make_feed()
    rule = feed.publisher.fail(503, seconds=60.0)
    assert [feed.fetch().status_code for _ in range(3)] == [503] * 3
    rule.until = time.monotonic()
    assert feed.fetch().status_code == 200
    assert feed.publisher.faults == []


def test_a_fault_hits_a_share_of_the_requests(make_feed: MakeFeed) -> None:
    feed = make_feed(seed=7)
    feed.publisher.fail(503, times=None, share=0.5)
    statuses = [feed.fetch().status_code for _ in range(40)]
    assert 5 < statuses.count(503) < 35
    with pytest.raises(ValueError, match="share"):
        feed.publisher.fail(503, share=0.0)


# A rate limit


@pytest.mark.parametrize(("status", "retry_after"), [(429, None), (503, 7)])
def test_a_rate_limit_refuses_what_is_too_much(
    make_feed: MakeFeed, status: int, retry_after: int | None
) -> None:
    feed = make_feed(2)
    feed.publisher.rate_limit = RateLimit(0.001, burst=3, status=status, retry_after=retry_after)
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
    feed.publisher.rate_limit = RateLimit(0.001)
    feed.publisher.fail(404)
    feed.publisher.fail(410)
    assert [feed.fetch().status_code for _ in range(3)] == [404, 429, 429]
    feed.publisher.rate_limit = None
    assert feed.fetch().status_code == 410


# A split that is rolled back


@pytest.mark.parametrize("dialect", V2)
def test_a_rollback_and_the_way_forward_keep_every_event(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(dialect=dialect, checkpoint_every=2)
    publisher = feed.publisher

    def publish(first: int) -> None:
        for n in range(first, first + 10):
            publisher.publish(n % 5, {"entity": n % 5, "n": n})

    publish(0)
    children = publisher.split(0, method="cursor-from")
    publish(10)
    publisher.roll_back(0)
    assert publisher.open_partitions() == [0]
    assert [event["n"] for event in feed.read_all(0)] == list(range(20))
    publish(20)
    assert publisher.roll_forward(0) == children
    assert publisher.open_partitions() == [*children]
    publish(30)
    found = [event for child in children for event in feed.read_all(child)]
    assert sorted(event["n"] for event in found) == list(range(40))
    for child in children:
        numbers = [event["n"] for event in feed.read_all(child)]
        assert numbers == sorted(numbers)


def test_cursors_stay_valid_over_a_rollback(make_feed: MakeFeed) -> None:
    feed = make_feed()
    feed.publisher.append(0, {"n": 1})
    (child,) = feed.publisher.split(0, 1, method="cursor-from")
    of_the_child = feed.read(child)[1]
    feed.publisher.append(child, {"n": 2})
    feed.publisher.roll_back(0)
    assert feed.fetch(child, of_the_child).status_code == 404
    events, of_the_parent = feed.read(0, of_the_child)
    assert events == [{"n": 2}]
    feed.publisher.append(0, {"n": 3})
    feed.publisher.roll_forward(0)
    assert feed.read(child, of_the_parent)[0] == [{"n": 3}]


def test_what_can_not_be_rolled_back(make_feed: MakeFeed) -> None:
    publisher = make_feed(4).publisher
    publisher.split(0, 1)
    (child,) = publisher.split(1, 1, method="cursor-from")
    publisher.split(child, 1, method="cursor-from")
    publisher.merge((2, 3))
    for partition in (0, 1, 2, 77):
        with pytest.raises(ValueError, match=r"partition"):
            publisher.roll_back(partition)
    with pytest.raises(ValueError, match="no split of partition"):
        publisher.roll_forward(4)


def test_a_consumer_reads_a_feed_that_goes_forward_again(make_feed: MakeFeed) -> None:
    feed = make_feed(seed=1)
    consumer = PlainConsumer(feed, 1)
    publisher = feed.publisher
    for n in range(10):
        publisher.publish(n % 3, {"entity": n % 3, "n": n})
    consumer.finish()
    publisher.split(0, method="cursor-from")
    publisher.roll_back(0)
    for n in range(10, 20):
        publisher.publish(n % 3, {"entity": n % 3, "n": n})
    publisher.roll_forward(0)
    consumer.finish()
    assert sorted(n for numbers in consumer.seen.values() for n in numbers) == list(range(20))


# A proxy that buffers streams


@pytest.mark.parametrize("dialect", V2)
def test_a_buffering_proxy_sends_a_stream_at_its_end(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(dialect=dialect, stream=True, quirks=Quirks(stream_buffer=8192))
    feed.publisher.append(0, {"n": 1})
    url, query = feed.request(0, "_first", stream=300)
    began = time.monotonic()
    with feed.http.stream("GET", url, params=query) as response:
        first = next(response.iter_raw())
    assert time.monotonic() - began >= 0.25
    assert parse(first.decode())[0][0] == [{"n": 1}]


def test_a_buffering_proxy_sends_what_is_full(make_feed: MakeFeed) -> None:
    feed = make_feed(stream=True, quirks=Quirks(stream_buffer=100))
    feed.publisher.append(0, {"text": "x" * 200})
    url, query = feed.request(0, "_first", stream="y")
    with feed.http.stream("GET", url, params=query) as response:
        received = next(response.iter_raw())
    assert parse(received.decode())[0][0] == [{"text": "x" * 200}]
