"""The runs in a staging location, and the clean-up of those that no query needs any more.

A query keeps two epochs of its run. A run is left behind by a query that will never start again,
and by a driver that died before Spark had logged its first offset.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

from feedapi_client.model import Position
from feedapi_client.spark.plan.epoch import decode
from feedapi_client.spark.staging.first_fetch import results_in
from feedapi_client.spark.staging.lease import delete_lease
from feedapi_client.spark.staging.location import Staging, listed, open_store
from feedapi_client.spark.staging.staging_errors import MissingObjectError, StagingError

_OBJECT = re.compile(r"([0-9a-f]{32})/(?:plan|data|seen|alive)(?:/|$)")


def staged_runs(location: str) -> dict[str, datetime]:
    """Return the runs in a staging location, and when the newest object of each was written.

    A query that runs renews its run at least once a day. Raises `StagingError`.
    """
    found: dict[str, datetime] = {}
    for key, _, written in listed(open_store(location)):
        if (ours := _OBJECT.match(key)) is not None:
            found[ours[1]] = max(written, found.get(ours[1], written))
    return found


def delete_run(location: str, run: str) -> None:
    """Delete the run of a query that never runs again, and its lease. Raises `StagingError`."""
    Staging(location, run).delete_all()
    delete_lease(location, run)


class RunOffsets(NamedTuple):
    """The cursors before the last micro-batch of a run, which has that number, and after it.

    The next micro-batch begins there, once the sink has this one.
    """

    feed: str
    epoch: int
    before: dict[int, str]
    after: dict[int, str]
    planned: dict[int, Position]
    """The positions of `before`, with their statuses."""


def read_offsets(location: str, run: str) -> RunOffsets:
    """Return the cursors of a run. Raises `StagingError`."""
    staging = Staging(location, run)
    epochs = staging.numbers(f"{run}/plan")
    if not epochs:
        raise StagingError(f"there is no run {run} in the staging location")
    epoch = max(epochs)
    key = staging.plan_key(epoch)
    plan = decode(staging.read(key), key)
    before = {partition: position.cursor for partition, position in plan.positions.items()}
    found = RunOffsets(plan.name, epoch, before, dict(before), plan.positions)
    for number in range(len(plan.groups)):
        with suppress(MissingObjectError):  # not fetched yet
            key = staging.data_key(epoch, number)
            for result in results_in(staging.read_header(key), key):
                found.after[result.partition] = result.cursor
    return found
