"""The runs in a staging location, and the clean-up of those that no query needs any more.

A query keeps two epochs of its run. A run is left behind by a query that will never start again,
and by a driver that died before Spark had logged its first offset.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from feedapi_client.spark.plan.epoch import decode
from feedapi_client.spark.staging.first_fetch import results_in
from feedapi_client.spark.staging.lease import delete_lease
from feedapi_client.spark.staging.location import Staging, listed, open_store
from feedapi_client.spark.staging.staging_errors import MissingObjectError, StagingError


@dataclass(frozen=True, slots=True)
class StagedRun:
    """One folder of the staging location."""

    run: str
    objects: int
    bytes: int
    last_used: datetime
    """When the newest object was written. A query that runs renews it at least once a day."""


def staged_runs(location: str) -> list[StagedRun]:
    """Return the runs in a staging location, the one that was used last at the end.

    Objects of others are not looked at.

    Raises:
        StagingError: the location can't be opened or read.
    """
    found: dict[str, list[tuple[int, datetime]]] = {}
    for key, size, written in listed(open_store(location)):
        run, _, rest = key.partition("/")
        if _is_run(run) and rest.partition("/")[0] in ("plan", "data", "seen", "alive"):
            found.setdefault(run, []).append((size, written))
    runs = [
        StagedRun(
            run,
            len(objects),
            sum(size for size, _ in objects),
            max(written for _, written in objects),
        )
        for run, objects in found.items()
    ]
    return sorted(runs, key=lambda run: run.last_used)


class RunOffsets(NamedTuple):
    """The cursors before the last micro-batch of a run, which has that number, and after it.

    The next micro-batch begins there, once the sink has this one.
    """

    feed: str
    epoch: int
    before: dict[int, str]
    after: dict[int, str]


def read_offsets(location: str, run: str) -> RunOffsets:
    """Return the cursors of a run.

    Raises:
        StagingError: there is no such run, or the location failed.
    """
    staging = Staging(location, run)
    epochs = staging.numbers(f"{run}/plan")
    if not epochs:
        raise StagingError(f"there is no run {run} in the staging location")
    epoch = max(epochs)
    key = staging.plan_key(epoch)
    plan = decode(staging.read(key), key)
    before = {partition: position.cursor for partition, position in plan.positions.items()}
    found = RunOffsets(plan.name, epoch, before, dict(before))
    for number in range(len(plan.groups)):
        with suppress(MissingObjectError):  # not fetched yet
            header = staging.read_header(staging.data_key(epoch, number))
            for result in results_in(header):
                found.after[result.partition] = result.cursor
    return found


def delete_runs(location: str, runs: Iterable[StagedRun]) -> int:
    """Delete the runs, and return the number of objects. Raises `StagingError`."""
    deleted = 0
    for one in runs:
        deleted += Staging(location, one.run).delete_all()
        delete_lease(location, one.run)
    return deleted


def _is_run(name: str) -> bool:
    return len(name) == 32 and all(c in "0123456789abcdef" for c in name)
