"""With `vary` two requests from one cursor differ.

Still every event of each entity comes exactly once and in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from feedapi_client.testing import Publisher
from tests.testing.served_feed import TIMEOUT, PlainConsumer, ServedFeed, parse

MakeFeed = Callable[..., ServedFeed]
ENTITIES = 12


def filled(make_feed: MakeFeed, count: int = 200, **settings: Any) -> ServedFeed:
    feed = make_feed(**settings)
    feed.publisher.extend(0, [{"entity": n % ENTITIES, "n": n} for n in range(count)])
    return feed


def published(publisher: Publisher) -> dict[Any, list[int]]:
    truth: dict[Any, list[int]] = defaultdict(list)
    for payload in publisher.payloads():
        truth[payload["entity"]].append(payload["n"])
    return truth


def test_responses_differ_with_vary_only(make_feed: MakeFeed) -> None:
    def responses(**settings: Any) -> list[str]:
        feed = filled(make_feed, page_size=50, **settings)
        return [feed.fetch().text for _ in range(10)]

    assert len({*responses(vary=True)}) > 5
    assert len({*responses()}) == 1
    assert responses(seed=7) == responses(seed=7)


def test_some_responses_have_events_after_the_last_checkpoint(make_feed: MakeFeed) -> None:
    feed = filled(make_feed, seed=1, page_size=50, checkpoint_every=5)
    assert any(parse(feed.fetch().text)[-1][1] is None for _ in range(20))


def test_the_end_of_a_closed_partition_is_its_last_cursor(make_feed: MakeFeed) -> None:
    feed = filled(make_feed, 100, seed=5, dialect="v2-draft", page_size=10, checkpoint_every=3)
    feed.publisher.close(0)
    consumer = PlainConsumer(feed, 5)
    consumer.finish()
    assert consumer.positions[0] == feed.partitions[0]["lastCursor"]


class History:
    """A random history of appends, splits, token rotations and changes of dialect.

    A consumer reads some of the feed in between.
    """

    def __init__(self, publisher: Publisher, consumer: PlainConsumer, seed: int) -> None:
        self.publisher = publisher
        self.consumer = consumer
        self.random = Random(seed)
        self.n = 0

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
        self._split(self.publisher.open_partitions(), "starts-after")

    def cursor_from(self) -> None:
        # Not where a parent might still be unread: discovery can't say "starts after" and
        # "cursor from" at once.
        listed = self.publisher.partitions
        roots = [id for id in self.publisher.open_partitions() if listed[id].starts_after is None]
        self._split(roots, "cursor-from")

    def _split(self, candidates: list[int], method: Any) -> None:
        if candidates:
            chosen = self.random.choice(candidates)
            self.publisher.split(chosen, self.random.randint(1, 3), method=method)


STEPS = ["append", "append", "read", "read", "rotate", "starts_after", "cursor_from"]


@settings(max_examples=min(60, settings().max_examples))
@given(
    steps=st.lists(st.sampled_from(STEPS), max_size=25),
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
    with publisher.serve(), httpx.Client(verify=False, timeout=TIMEOUT) as http:
        consumer = PlainConsumer(ServedFeed(publisher, http), seed)
        history = History(publisher, consumer, seed)
        for step in ["append", *steps]:
            getattr(history, step)()
        publisher.vary = history.random.random() < 0.5
        consumer.finish()
    assert consumer.seen == published(publisher)
