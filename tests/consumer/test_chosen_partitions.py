"""`FeedConsumer(partitions=...)`: only these are read and saved, in order among them."""

from __future__ import annotations

import pytest

from feedapi_client import RetryPolicy
from feedapi_client.errors import LineageError
from feedapi_client.testing.publisher import faults
from tests.consumer.script import Step, do, play

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

# Partitions 0 and 1; 0 is followed by 2 and 3. The event of each holds its number.
SPLIT = [
    *(do.begin_with(2), do.numbers(0, 0), do.numbers(1, 1)),
    *(do.split(0, into=(2, 3)), do.numbers(2, 2), do.numbers(3, 3)),
]
UNLISTED = LineageError, "does not list this partition, only partitions 0, 1, 2, 3"
PATIENCE = RetryPolicy(base_delay=0.002, max_delay=0.01, refused_for=0.1)
STARTS = do.fail(faults.Edit(lambda found: {**found, "partitions": None}), on="discovery", times=2)
STEPS: dict[str, list[Step]] = {
    "only the chosen partitions are read and saved": [
        *(*SPLIT, do.reads_all(1, 2, partitions=[1, 2]), do.unasked(0, 3)),
        do.stored({1: "open", 2: "open"}),
    ],
    "r08 a chosen child waits for its chosen parent": [*SPLIT, do.reads(0, 2, partitions={2, 0})],
    "those left out are read by a later run": [
        *(*SPLIT, do.reads(1, partitions=[1]), do.reads_all(0, 2, 3)),
    ],
    "one that is not listed is an error": [
        *(*SPLIT, do.raises(*UNLISTED, do.enter(partitions=[9]))),
    ],
    "r12 one that the first list lacks is an error, though a list was empty before": [
        *(*SPLIT, STARTS, do.open(partitions=[1, 9], retry=PATIENCE)),
        do.raises(*UNLISTED, do.takes(1)),
    ],
    "r12 one that a starting publisher lists later is awaited": [
        *(do.numbers(0, 0), STARTS, do.open(partitions=[0, 1])),
        do.nothing_until(lambda play: len(play.feed.requests) > 3),
        *(do.split(0, into=(1,)), do.numbers(1, 1)),
        *(do.delivers("first", 0), do.commits("first"), do.delivers("second", 1)),
    ],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
async def test_chosen_partitions(steps: list[Step]) -> None:
    await play(*steps)
