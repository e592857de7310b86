"""What a batch read reads: lineage chains and their ends, the same for all scans of a DataFrame.

Spark plans each scan of an action by a call into a Python process that knows nothing of the others,
and with adaptive execution it may plan one again while others have run. A feed that grows meanwhile
would give a self-join two ends. So the first scan notes what it found, under the id of the
DataFrame. When an action ends is nothing that such a process can know: the note is valid for an
hour.
"""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyspark.sql.datasource import InputPartition

from feedapi_client.lineage.planner import Fail, Planner
from feedapi_client.model import FeedInfo
from feedapi_client.options import FetchOptions
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fetch import Target, read_end
from feedapi_client.spark.plan.epoch import check_partitions, count_before, only
from feedapi_client.spark.plan.probe import Probe
from feedapi_client.spark.source_options import SourceOptions
from feedapi_client.spark.staging.location import private_folder

_log = logging.getLogger(__name__)

SHARED_SECONDS = 3600.0
"""Seconds for which the scans of a DataFrame see the same ends."""


@dataclass(frozen=True)
class Chain(InputPartition):
    """The partitions that one task of a batch read reads, one after the other."""

    targets: list[Target]
    info: FeedInfo
    fetch: FetchOptions

    def __repr__(self) -> str:
        return f"Chain({[target.partition for target in self.targets]})"


@dataclass(slots=True)
class FeedSnapshot:
    """A feed as it was when an action started.

    `starts` has the cursors of partitions that are read from their present end on, `ends` where
    open partitions end.
    """

    info: FeedInfo
    starts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str | None] = field(default_factory=dict)


def _noted(folder: Path, dataframe: str) -> FeedSnapshot | None:
    """Return what earlier scans of the DataFrame found; delete the notes that are too old."""
    old = time.time() - SHARED_SECONDS
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            if file.stat().st_mtime <= old:
                file.unlink()
    with suppress(FileNotFoundError):
        # The folder is this user's own, as are the pickles that Spark passes around.
        return pickle.loads((folder / dataframe).read_bytes())  # type: ignore[no-any-return]  # noqa: S301
    return None


def _note(folder: Path, dataframe: str, found: FeedSnapshot) -> None:
    """Note what was found, for other scans. The time of the first note stays."""
    try:
        number, new = tempfile.mkstemp(dir=folder)
        with os.fdopen(number, "wb") as file:
            pickle.dump(found, file)
        with suppress(FileNotFoundError):
            began = (folder / dataframe).stat().st_mtime
            os.utime(new, (began, began))
        Path(new).rename(folder / dataframe)
    except OSError as error:
        _log.warning("another scan of this action may see another end of the feed: %s", error)


def chains_to_read(options: SourceOptions, dataframe: str) -> list[Chain]:
    """Return what to read of the feed.

    What earlier scans of the DataFrame with that id found is what this one sees.
    """
    folder = private_folder("feedapi-reads")  # Spark plans all scans on the driver's machine
    connection = FeedConnection(options)
    known = _noted(folder, dataframe)
    if known is None:
        known = FeedSnapshot(connection.info)
    else:
        connection.restore(known.info)
    found = _with_ends(options, connection, chains(options, connection, known), known)
    _note(folder, dataframe, known)
    fetch = connection.fetch_options
    return [Chain(one, only(known.info, [t.partition for t in one]), fetch) for one in found]


def chains(
    options: SourceOptions, connection: FeedConnection, snapshot: FeedSnapshot
) -> list[list[Target]]:
    """Return what to read, cut into lineage chains.

    A partition is in the chain of its parent if that has no other child. Chains may be read at the
    same time: column `depth` says what came first. Raises `FeedError`, `OptionError`.
    """
    info = snapshot.info
    if options.partitions is not None:
        check_partitions(options, info)
    if options.ending_cursors:
        check_partitions(options, info, options.ending_cursors.keys(), "endingCursors")
    # Unordered: a batch reads children whether or not their parents were read before.
    planner = Planner(
        feed=connection.url,
        start=options.starting_cursors,
        ordered=False,
        partitions=options.partitions,
        lineage=options.lineage,
        selects_events=bool(connection.fetch_options.selection()),
    )
    planner.load({})
    for partition in planner.unresolved(info):
        if partition not in snapshot.starts:
            snapshot.starts[partition] = read_end(connection, partition)
    for action in planner.discover(info, ends=snapshot.starts):
        if isinstance(action, Fail):
            raise action.error
    return _chains_of(planner)


def _with_ends(
    options: SourceOptions,
    connection: FeedConnection,
    chains: list[list[Target]],
    snapshot: FeedSnapshot,
) -> list[list[Target]]:
    """Return the chains with the end of each partition: the one asked for, or the present one."""
    asked, ends = options.ending_cursors, snapshot.ends
    open_ones = (one.partition for targets in chains for one in targets if not one.closed)
    ends |= Probe(connection).ends([p for p in open_ones if p not in asked and p not in ends])
    bounds = {**ends, **asked}
    return [
        [replace(t, end=bounds.get(t.partition), required=t.partition in asked) for t in targets]
        for targets in chains
    ]


def _chains_of(planner: Planner) -> list[list[Target]]:
    found: list[list[Target]] = []
    chain_of: dict[int, list[Target]] = {}
    cursors = planner.runnable()
    depths: dict[int, int] = {}
    before = {id: [p for p in planner.preceding(id) if p in planner.graph] for id in cursors}
    count_before({id: dict.fromkeys(others, 1) for id, others in before.items()}, depths)
    for partition in sorted(cursors, key=lambda p: (depths[p], p)):
        listed = planner.graph.partitions[partition]
        target = Target(
            partition,
            cursors[partition],
            listed.closed,
            listed.last_cursor,
            depth=depths[partition],
        )
        parent = listed.starts_after
        only_child = parent is not None and len(planner.graph.children[parent]) == 1
        chain = chain_of.get(parent) if only_child and parent is not None else None
        if chain is None:
            chain = []
            found.append(chain)
        chain.append(target)
        chain_of[partition] = chain
    return found
