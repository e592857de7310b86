"""A rewound consumer gets exactly the events that it had not handled at that time.

Also across splits of both methods.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.stores import Journal, SQLiteCursorStore
from feedapi_client.testing import Publisher
from tests.consumer.helpers import by_entity, consume, fill

pytestmark = pytest.mark.anyio
History = list[tuple[datetime, list[Any]]]


async def read_to_the_end(
    publisher: Publisher, store: SQLiteCursorStore, handled: list[Any], history: History
) -> None:
    """Consume what there is, and record after each commit what was handled at that time."""
    async with consume(publisher, store=store, follow=False) as consumer:
        async for batch in consumer.batches():
            handled += [event.json() for event in batch.events]
            await batch.commit()
            history.append((datetime.now(UTC), list(handled)))


async def read_through_splits(
    publisher: Publisher, store: SQLiteCursorStore, splits: list[str], dice: random.Random
) -> History:
    handled: list[Any] = []
    history: History = []
    fill(publisher, 40)
    await read_to_the_end(publisher, store, handled, history)
    for number, method in enumerate(splits, 1):
        fill(publisher, 20, start=100 * number)
        if dice.random() < 0.5:
            await read_to_the_end(publisher, store, handled, history)
        publisher.split(dice.choice(publisher.open_partitions()), method=method)  # type: ignore[arg-type]
        if dice.random() < 0.5:
            publisher.rotate_token()
        fill(publisher, 40, start=100 * number + 50)
        await read_to_the_end(publisher, store, handled, history)
    return history


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "splits",
    [
        ["starts-after"],
        ["cursor-from"],
        ["cursor-from", "starts-after"],
        ["starts-after", "cursor-from", "starts-after"],
        ["cursor-from", "cursor-from", "starts-after", "cursor-from", "starts-after"],
    ],
    ids="+".join,
)
async def test_after_a_rewind_each_event_not_handled_before_comes_once_and_in_order(
    feedapi_publisher_factory: Callable[..., Publisher],
    tmp_path: Path,
    splits: list[str],
    seed: int,
) -> None:
    dice = random.Random(seed)
    publisher = feedapi_publisher_factory(page_size=9, checkpoint_every=4)
    async with SQLiteCursorStore(tmp_path / "cursors.db", journal=Journal(keep=None)) as store:
        history = await read_through_splits(publisher, store, splits, dice)
        (feed,) = await store.feeds()
        for when, handled in dice.sample(history, 4):
            await store.rewind(feed, when)
            again: list[Any] = []
            await read_to_the_end(publisher, store, again, [])
            found, expected = handled + again, publisher.payloads()
            if len(splits) < 5:
                assert by_entity(found) == by_entity(expected)
            # When an ancestor and its parent are both gone from discovery, nothing says any more
            # what a successor has to wait for.
            assert sorted(each["n"] for each in found) == sorted(each["n"] for each in expected)


def test_a_retention_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"Journal\.keep must be positive"):
        Journal(keep=timedelta(0))
