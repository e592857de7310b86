"""Two consumers of one name, as real processes on one database."""

from __future__ import annotations

from collections import Counter

import pytest

from feedapi_client.testing import Publisher
from tests.crash.application import Row, application_class
from tests.crash.consumer import FENCED
from tests.crash.process import ConsumerProcess, run_until_one_ends

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]


class Feed:
    """A feed that grows by rounds of events, one event for each of eight entities."""

    def __init__(self, partitions: int) -> None:
        self.publisher = Publisher(partitions, page_size=20, checkpoint_every=5, seed=partitions)
        self.rounds = 0

    def grow(self) -> None:
        for entity in range(8):
            self.publisher.publish(
                f"entity {entity}", {"entity": f"entity {entity}", "n": self.rounds}
            )
        self.rounds += 1

    def events(self) -> Counter[tuple[str, int]]:
        return Counter((f"entity {entity}", n) for entity in range(8) for n in range(self.rounds))


async def read_to_the_end(url: str, database: str) -> list[Row]:
    """Let a third consumer read the rest; return all effects.

    Those of each entity are in order and without gaps.
    """
    with ConsumerProcess(url, database, "--to-the-end") as consumer:
        assert consumer.finish() == 0, consumer.errors()
    application = application_class(database)(database)
    rows, misplaced = application.rows(), application.misplaced()
    await application.aclose()
    assert misplaced == 0
    return rows


@pytest.mark.parametrize("partitions", [1, 4])
async def test_r17_one_consumer_advances_a_partition_and_the_other_ends_fenced(
    database: str, partitions: int
) -> None:
    """With several partitions each may win some and be fenced on the others: then both end."""
    await application_class(database).create(database)
    feed = Feed(partitions)
    with feed.publisher.serve() as url:
        with ConsumerProcess(url, database) as one:
            one.wait_until_open()
            with ConsumerProcess(url, database) as other:
                other.wait_until_open()
                # Both stand before the first event.
                one.let_go()
                other.let_go()
                for loser in run_until_one_ends([one, other], feed.grow):
                    assert loser.process.returncode == FENCED, loser.errors()
                    assert (
                        "another consumer named 'default' advanced this partition" in loser.errors()
                    )
                writers = {one.process.pid, other.process.pid}
        rows = await read_to_the_end(url, database)
    assert Counter((row.entity, row.n) for row in rows) == feed.events()
    for partition in range(partitions):
        assert len({row.writer for row in rows if row.partition == partition} & writers) <= 1


async def test_r17_two_consumers_that_start_at_once_do_nothing_twice(database: str) -> None:
    await application_class(database).create(database)
    feed = Feed(4)
    feed.grow()
    with feed.publisher.serve() as url:
        with ConsumerProcess(url, database) as one, ConsumerProcess(url, database) as other:
            ended = run_until_one_ends([one, other], feed.grow)
            assert [loser.process.returncode for loser in ended] == [FENCED] * len(ended), [
                loser.errors() for loser in ended
            ]
        rows = await read_to_the_end(url, database)
    assert Counter((row.entity, row.n) for row in rows) == feed.events()
