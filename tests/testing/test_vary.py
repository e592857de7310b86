"""Two requests from one cursor differ, and still every event of each entity comes exactly once and in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feedapi_client.testing import Publisher
from tests.testing.feed import Consumer, Feed, parse

MakeFeed = Callable[..., Feed]
ENTITIES = 12


def published(publisher: Publisher) -> dict[Any, list[int]]:
    truth: dict[Any, list[int]] = defaultdict(list)
    for payload in publisher.payloads():
        truth[payload["entity"]].append(payload["n"])
    return truth


def test_responses_from_one_cursor_differ(feed: MakeFeed) -> None:
    one = feed(vary=True, page_size=50)
    one.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(200)])
    assert len({one.fetch().text for _ in range(10)}) > 5


def test_a_seed_makes_them_reproducible(feed: MakeFeed) -> None:
    def read() -> list[str]:
        one = feed(seed=7, page_size=50)
        one.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(200)])
        return [one.fetch().text for _ in range(5)]

    assert read() == read()


def test_without_vary_responses_are_the_same(feed: MakeFeed) -> None:
    one = feed(page_size=50)
    one.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(200)])
    assert one.fetch().text == one.fetch().text


def test_some_responses_have_events_behind_the_last_checkpoint(feed: MakeFeed) -> None:
    one = feed(seed=1, page_size=50, checkpoint_every=5)
    one.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(200)])
    assert any(parse(one.fetch().text)[-1][1] is None for _ in range(20))


def test_refetching_from_the_first_cursor_would_show_it(feed: MakeFeed) -> None:
    # The check of the check: a consumer that keeps events and forgets to keep the cursor with them gets duplicates or gaps.
    one = feed(seed=1, page_size=20, checkpoint_every=5)
    one.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(200)])
    batches = parse(one.fetch().text)
    kept = [event["n"] for events, _ in batches for event in events]
    again = [event["n"] for events, _ in parse(one.fetch().text) for event in events]
    assert kept[: len(again)] != again[: len(kept)]


def test_it_can_be_switched_off_and_on_between_requests(feed: MakeFeed) -> None:
    one = feed(seed=3, page_size=10, checkpoint_every=3)
    one.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(300)])
    consumer = Consumer(one, 3)
    while consumer.step():
        one.publisher.vary = not one.publisher.vary
    assert consumer.seen == published(one.publisher)


def test_the_end_of_a_closed_partition_is_its_last_cursor(feed: MakeFeed) -> None:
    one = feed(seed=5, dialect="v2-draft", page_size=10, checkpoint_every=3)
    one.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(100)])
    one.publisher.close(0)
    consumer = Consumer(one, 5)
    consumer.finish()
    assert consumer.positions[0] == one.discover()["partitions"][0]["lastCursor"]


class _Story:
    """A random history of appends, splits, token rotations and changes of dialect, read in between by a consumer."""

    def __init__(self, publisher: Publisher, consumer: Consumer, seed: int) -> None:
        self.publisher = publisher
        self.consumer = consumer
        self.random = Random(seed)
        self.n = 0

    def run(self, chapters: list[str]) -> None:
        for chapter in chapters:
            getattr(self, chapter)()
        self.publisher.vary = self.random.random() < 0.5
        self.consumer.finish()

    def append(self) -> None:
        for _ in range(self.random.randint(1, 40)):
            entity = f"e{self.random.randrange(ENTITIES)}"
            self.publisher.publish(entity, {"entity": entity, "n": self.n})
            self.n += 1

    def read(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.consumer.step()

    def rotate(self) -> None:
        self.publisher.rotate_token()
        self.publisher.dialect = self.random.choice(["v2-draft", "v2-token"])

    def starts_after(self) -> None:
        self.publisher.split(
            self.random.choice(self.publisher.open_partitions()),
            self.random.randint(1, 3),
            method="starts-after",
        )

    def cursor_from(self) -> None:
        # Not where a parent might still be unread: discovery can't say "starts after" and "cursor from" at once.
        able = [
            id
            for id, one in self.publisher.partitions.items()
            if not one.closed and one.starts_after is None
        ]
        if able:
            self.publisher.split(
                self.random.choice(able), self.random.randint(1, 3), method="cursor-from"
            )


CHAPTERS = st.lists(
    st.sampled_from(["append", "append", "read", "read", "rotate", "starts_after", "cursor_from"]),
    max_size=25,
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    chapters=CHAPTERS,
    seed=st.integers(0, 2**16),
    page_size=st.integers(1, 40),
    every=st.integers(1, 10),
    vary=st.booleans(),
)
def test_every_event_once_and_in_order_through_any_history(
    http: httpx.Client, chapters: list[str], seed: int, page_size: int, every: int, vary: bool
) -> None:
    publisher = Publisher(2, page_size=page_size, checkpoint_every=every, seed=seed)
    publisher.vary = vary
    with publisher.serve():
        consumer = Consumer(Feed(publisher, http), seed)
        _Story(publisher, consumer, seed).run(["append", *chapters])
    assert consumer.seen == published(publisher)


def test_vary_does_not_stop_at_hidden_events(feed: MakeFeed) -> None:
    one = feed(seed=2, page_size=5, checkpoint_every=2)
    one.publisher.scan_limit = 8
    for n in range(20):
        one.publisher.append_internal(0, 7)
        one.publisher.append(0, {"entity": n % 3, "n": n})
    consumer = Consumer(one, 2)
    consumer.finish()
    assert consumer.seen == published(one.publisher)


@pytest.mark.parametrize("scan", [1, 2, 1000])
def test_the_scan_limit_costs_no_event(feed: MakeFeed, scan: int) -> None:
    one = feed(seed=2, page_size=1, checkpoint_every=1)
    one.publisher.scan_limit = scan
    one.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(60)])
    consumer = Consumer(one, 2)
    consumer.finish()
    assert consumer.seen == published(one.publisher)
