"""Where a streaming query stands, by its checkpoint and its staging location. Starts no Spark."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from feedapi_client.model import FeedKey, Position
from feedapi_client.operations import FeedPositions
from feedapi_client.spark.epoch import decode
from feedapi_client.spark.staging import (
    MissingObjectError,
    Objects,
    StagingError,
    default_location,
)

_OF_INGEST = "/_feedapi/checkpoint"


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
    """Return the cursors of a run at a staging location. Raises `StagingError`."""
    objects = Objects(location, run)
    epochs = objects.numbers(f"{run}/plan")
    if not epochs:
        raise StagingError(f"there is no run {run} in the staging location")
    epoch = max(epochs)
    key = objects.plan_key(epoch)
    plan = decode(objects.get(key), key)
    before = {partition: position.cursor for partition, position in plan.positions.items()}
    found = RunOffsets(plan.name, epoch, before, dict(before), plan.positions)
    for number in range(len(plan.groups)):
        with suppress(MissingObjectError):  # not fetched yet
            for result in objects.head(objects.data_key(epoch, number)):
                found.after[result.partition] = result.cursor
    return found


def read_positions(checkpoint: str, staging: str | None = None) -> list[FeedPositions]:
    """Return the positions of each feed of a query: behind its last committed micro-batch.

    Arguments:
        checkpoint: its location, a path or a URL.
        staging: option ``stagingLocation`` of the query. By default where ``feedapi ingest`` has it
            beside this checkpoint, or else where the source has it.

    Raises:
        StagingError: no query ran with this checkpoint, or its run is not at that location.
    """
    checkpoint = checkpoint.rstrip("/")
    if staging is None and checkpoint.endswith(_OF_INGEST):
        staging = f"{checkpoint.removesuffix('checkpoint')}staging"
    folder = checkpoint.removeprefix("file://")
    if "://" not in folder and not Path(folder).is_dir():  # which `Objects` would make
        raise StagingError(f"{checkpoint}: there is no such folder")
    files = Objects(checkpoint, "offsets")
    batches = files.numbers("offsets")
    if not batches:
        raise StagingError(f"{checkpoint}: no query ran with this checkpoint")
    last = max(batches)
    committed = last in files.numbers("commits")
    location, found = staging or default_location(), []
    for line in files.get(f"offsets/{last}").splitlines()[2:]:
        with suppress(orjson.JSONDecodeError):
            offset = orjson.loads(line)  # of this source, or of another one beside it
            if isinstance(offset, dict) and offset.get("run"):
                found.append(_positions(location, offset, committed=committed))
    return found


def _positions(location: str, offset: dict[str, Any], *, committed: bool) -> FeedPositions:
    try:
        run = read_offsets(location, offset["run"])
    except StagingError as error:
        raise StagingError(f"{error}: --staging takes the query's stagingLocation") from None
    # A newer plan begins behind the micro-batch that the offset is of.
    read = run.after if committed and run.epoch == offset["epoch"] else run.before
    known = {id: run.planned.get(id, Position(cursor)) for id, cursor in read.items()}
    positions = {id: replace(at, cursor=read[id]) for id, at in known.items()}
    return FeedPositions(FeedKey(run.feed, "spark"), positions)
