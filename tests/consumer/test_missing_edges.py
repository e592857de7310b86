"""R8: a publisher that leaves out the edge to partition 0, as an application sees it."""

from __future__ import annotations

from typing import Any

import pytest

from feedapi_client import LineageError
from feedapi_client.testing import Quirks
from tests.consumer.helpers import LocalFeed
from tests.consumer.script import Step, do, play

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

DRAFT = do.begin_with(dialect="v2-draft", quirks=Quirks(omit_parent_zero=True))
TOKEN = do.begin_with(quirks=Quirks(omit_parent_zero=True))
EDGES: dict[str, Any] = {"lineage": {1: 0, 2: 0}}
CONTRADICTS = LineageError, "partition 2: lineage= says that it starts after"
STEPS: dict[str, list[Step]] = {
    "a split without edges is reported": [
        *(DRAFT, do.fill(0, 10), do.open(), do.takes(*range(10)), do.reports(0)),
        *(do.split(0, 2), do.reported("lineage={1: 0, 2: 0}"), do.reports(1)),
    ],
    **{
        f"the children of partition 0 wait for it without any option, lastCursor {listed}": [
            do.begin_with(2, quirks=Quirks(omit_parent_zero=True, last_cursor=listed)),
            *(do.fill(0, 60), do.split(0, 2), do.fill(60, 120), do.open(follow=False)),
            *(do.ends_in_order(), do.reports(1)),
            do.reported("partitions 1, 2, 3 may start after partition 0", "lineage={"),
        ]
        for listed in ("closed", "never")
    },
    "lineage= keeps the order": [
        *(TOKEN, do.fill(0, 30), do.split(0, 2), do.fill(30, 60)),
        *(do.open(follow=False, **EDGES), do.ends_in_order(), do.reports(0), do.leave()),
        *(do.fill(60, 65), do.remove(0), do.reads_all(*range(60, 65), **EDGES)),
    ],
    "lineage= may be declared before the split": [
        *(TOKEN, do.fill(0, 30), do.open(lineage={1: 0, 2: 0, 8: None}), do.takes(*range(20))),
        *(do.split(0, (1, 2)), do.fill(30, 60), do.takes(*range(20, 30))),
        *(do.takes_all(*range(30, 60)), do.reports(0)),
    ],
    "lineage= that contradicts the publisher is an error on entry": [
        *(do.begin_with(2), do.split(0, (2, 3))),
        *(do.raises(*CONTRADICTS, do.enter(lineage={2: 1})), do.saved(0)),
    ],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
async def test_r08_edges_that_the_publisher_leaves_out(steps: list[Step]) -> None:
    await play(*steps)


def test_r08_lineage_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="lineage must hold partitions' ids"):
        LocalFeed().consume(lineage={"1": 0})
