"""With `vary` two requests from one cursor differ.

Still every event of each entity comes exactly once and in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedapi_client.testing import Publisher
from tests.testing.served_feed import PlainConsumer, ServedFeed, called, parse

MakeFeed = Callable[..., ServedFeed]
ENTITIES = 12


def published(publisher: Publisher) -> dict[Any, list[int]]:
    truth: dict[Any, list[int]] = defaultdict(list)
    for payload in publisher.payloads():
        truth[payload["entity"]].append(payload["n"])
    return truth


def test_responses_from_one_cursor_differ(make_feed: MakeFeed) -> None:
    feed = make_feed(vary=True, page_size=50)
    feed.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(200)])
    assert len({feed.fetch().text for _ in range(10)}) > 5


def test_a_seed_makes_them_reproducible(make_feed: MakeFeed) -> None:
    def read() -> list[str]:
        feed = make_feed(seed=7, page_size=50)
        feed.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(200)])
        return [feed.fetch().text for _ in range(5)]

    assert read() == read()


def test_without_vary_responses_are_the_same(make_feed: MakeFeed) -> None:
    feed = make_feed(page_size=50)
    feed.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(200)])
    assert feed.fetch().text == feed.fetch().text


def test_some_responses_have_events_after_the_last_checkpoint(make_feed: MakeFeed) -> None:
    feed = make_feed(seed=1, page_size=50, checkpoint_every=5)
    feed.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(200)])
    assert any(parse(feed.fetch().text)[-1][1] is None for _ in range(20))


def test_a_consumer_that_forgets_its_cursor_is_found_out(make_feed: MakeFeed) -> None:
    # This shows that the tests below can fail: a consumer that keeps events and forgets to keep
    # their cursor gets duplicates or gaps.
    feed = make_feed(seed=1, page_size=20, checkpoint_every=5)
    feed.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(200)])
    batches = parse(feed.fetch().text)
    kept = [event["n"] for events, _ in batches for event in events]
    again = [event["n"] for events, _ in parse(feed.fetch().text) for event in events]
    assert kept[: len(again)] != again[: len(kept)]


def test_vary_can_be_switched_off_and_on_between_requests(make_feed: MakeFeed) -> None:
    feed = make_feed(seed=3, page_size=10, checkpoint_every=3)
    feed.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(300)])
    consumer = PlainConsumer(feed, 3)
    while consumer.step():
        feed.publisher.vary = not feed.publisher.vary
    assert consumer.seen == published(feed.publisher)


def test_the_end_of_a_closed_partition_is_its_last_cursor(make_feed: MakeFeed) -> None:
    feed = make_feed(seed=5, dialect="v2-draft", page_size=10, checkpoint_every=3)
    feed.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(100)])
    feed.publisher.close(0)
    consumer = PlainConsumer(feed, 5)
    consumer.finish()
    assert consumer.positions[0] == feed.discover()["partitions"][0]["lastCursor"]


class History:
    """A random history of appends, splits, token rotations and changes of dialect.

    A consumer reads some of the feed in between.
    """

    def __init__(self, publisher: Publisher, consumer: PlainConsumer, seed: int) -> None:
        self.publisher = publisher
        self.consumer = consumer
        self.random = Random(seed)
        self.n = 0

    def run(self, steps: list[str]) -> None:
        for step in steps:
            getattr(self, step)()
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
        # Not where a parent might still be unread: discovery can't say "starts after" and
        # "cursor from" at once.
        candidates = [
            partition.id
            for partition in self.publisher.partitions.values()
            if not partition.closed and partition.starts_after is None
        ]
        if candidates:
            self.publisher.split(
                self.random.choice(candidates), self.random.randint(1, 3), method="cursor-from"
            )


STEPS = st.lists(
    st.sampled_from(["append", "append", "read", "read", "rotate", "starts_after", "cursor_from"]),
    max_size=25,
)


@settings(max_examples=min(60, settings().max_examples))
@given(
    steps=STEPS,
    seed=st.integers(0, 2**16),
    page_size=st.integers(1, 40),
    every=st.integers(1, 10),
    vary=st.booleans(),
)
def test_every_event_once_and_in_order_through_any_history(
    steps: list[str], seed: int, page_size: int, every: int, vary: bool
) -> None:
    publisher = Publisher(2, page_size=page_size, checkpoint_every=every, seed=seed)
    publisher.vary = vary
    with called(publisher) as feed:
        consumer = PlainConsumer(feed, seed)
        History(publisher, consumer, seed).run(["append", *steps])
    assert consumer.seen == published(publisher)


def test_vary_does_not_stop_at_hidden_events(make_feed: MakeFeed) -> None:
    feed = make_feed(seed=2, page_size=5, checkpoint_every=2)
    feed.publisher.scan_limit = 8
    for n in range(20):
        feed.publisher.append_internal(0, 7)
        feed.publisher.append(0, {"entity": n % 3, "n": n})
    consumer = PlainConsumer(feed, 2)
    consumer.finish()
    assert consumer.seen == published(feed.publisher)


@pytest.mark.parametrize("scan", [1, 2, 1000])
def test_the_scan_limit_costs_no_event(make_feed: MakeFeed, scan: int) -> None:
    feed = make_feed(seed=2, page_size=1, checkpoint_every=1)
    feed.publisher.scan_limit = scan
    feed.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(60)])
    consumer = PlainConsumer(feed, 2)
    consumer.finish()
    assert consumer.seen == published(feed.publisher)
