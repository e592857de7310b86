"""``spark.read.format("feedapi")``: every partition to its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import orjson
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from feedapi_client.errors import CursorRejectedError
from feedapi_client.lineage.order import count_before
from feedapi_client.lineage.planner import Fail, Planner
from feedapi_client.model import FeedInfo
from feedapi_client.options import FetchOptions
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.spark.concurrency import InThreads
from feedapi_client.spark.connection import FeedConnection
from feedapi_client.spark.fetch import PartitionReader, read_end
from feedapi_client.spark.options import SourceOptions
from feedapi_client.spark.plan.probe import Probe
from feedapi_client.spark.plan.selection import check_partitions, only
from feedapi_client.spark.schema import RowBuilder
from feedapi_client.spark.target import Target


@dataclass(frozen=True, slots=True)
class Chain:
    """The partitions that one task reads, one after the other.

    `source` is the number of their feed among those of the options.
    """

    targets: list[Target]
    info: FeedInfo
    fetch: FetchOptions
    source: int = 0


class ChainPartition(InputPartition):
    """One task of a batch read."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def __repr__(self) -> str:
        partitions = [target.partition for target in self.chain.targets]
        return f"ChainPartition({partitions}, feed={self.chain.source})"


class FeedReader(DataSourceReader):
    """Reader of one batch read.

    The end of an open partition is fixed when an action starts. Two actions on one DataFrame may
    therefore see different ends: cache the DataFrame, or write it out first.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        """Return one task for each lineage chain of each feed.

        Raises:
            FeedError: the feed can't be read.
            OptionError: credentials are missing, or an option does not fit the feed.
        """
        feeds = list(enumerate(self.options.of_feeds()))
        found = InThreads("feedapi-batch").map(_chains_of_feed, feeds)
        return [ChainPartition(chain) for chains in found for chain in chains]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a chain. Raises `FeedError`, `OptionError`."""
        if not isinstance(partition, ChainPartition):
            return  # a feed without partitions: Spark runs one task that has nothing to read
        chain = partition.chain
        options = self.options.of_feeds()[chain.source]
        with FeedConnection(options, chain.fetch, chain.info) as connection:
            for target in chain.targets:
                yield from _read(options, connection, target)


def _chains_of_feed(feed: tuple[int, SourceOptions]) -> list[Chain]:
    source, options = feed
    with FeedConnection(options) as connection:
        info = connection.info
        found = with_fixed_ends(connection, chains(options, connection, info))
        fetch = connection.fetch_options
        return [Chain(one, _task_info(info, one), fetch, source) for one in found]


def chains(
    options: SourceOptions, connection: FeedConnection, info: FeedInfo
) -> list[list[Target]]:
    """Return what to read, cut into lineage chains.

    A partition is in the chain of its parent if that has no other child. Chains may be read at the
    same time: column `depth` says what came first.

    Raises:
        FeedError: the partitions make no valid lineage, or an end can't be read.
        OptionError: option ``partitions`` names one that the feed does not list.
    """
    if options.partitions is not None:
        check_partitions(options, info)
    # Unordered: a batch reads children whether or not their parents were read before.
    planner = Planner(
        feed=connection.url,
        start=options.start,
        ordered=False,
        partitions=options.partitions,
        lineage=options.lineage,
        selects_events=bool(connection.fetch_options.selection()),
    )
    planner.load({})
    ends = {partition: read_end(connection, partition) for partition in planner.unresolved(info)}
    for action in planner.discover(info, ends=ends):
        if isinstance(action, Fail):
            raise action.error
    return _chains_of(planner, seek=options.start_time is not None)


def with_fixed_ends(connection: FeedConnection, chains: list[list[Target]]) -> list[list[Target]]:
    """Return the chains with the present end of each open partition.

    Raises:
        FeedError: no retry helps.
    """
    open_ones = [t.partition for targets in chains for t in targets if not t.closed]
    ends = Probe(connection).ends(open_ones)
    return [[replace(t, end=ends.get(t.partition)) for t in targets] for targets in chains]


def _chains_of(planner: Planner, *, seek: bool) -> list[list[Target]]:
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
            seek=seek,
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


def _task_info(info: FeedInfo, targets: list[Target]) -> FeedInfo:
    """The discovery as far as the task needs it. Dialect v1 sends the number of all partitions."""
    if info.dialect == "v1":
        return info
    return only(info, [target.partition for target in targets])


def _read(
    options: SourceOptions, connection: FeedConnection, target: Target
) -> Iterator[pa.RecordBatch]:
    """Yield the partition to its end, in Arrow batches of about `Limits.max_batch_bytes`."""
    reader = PartitionReader(connection, target)
    sequence = size = 0
    pending: list[CheckpointedEvents] = []
    for batch in reader.batches():
        if batch.events:
            pending.append(batch)
            size += batch.size
        if size >= options.limits.max_batch_bytes:
            yield rows(options, connection, target, sequence, pending)
            sequence += sum(len(one.events) for one in pending)
            pending, size = [], 0
    if pending:
        yield rows(options, connection, target, sequence, pending)
    result = reader.result
    if result.refused is not None:
        raise CursorRejectedError(
            f"the publisher refused a fetch from {result.cursor!r} (status "
            f"{result.refused or 'not listed any more'}): the partitions changed while they were "
            "read. Read again",
            feed=connection.url,
            partition=target.partition,
        )


def rows(
    options: SourceOptions,
    connection: FeedConnection,
    target: Target,
    sequence: int,
    batches: list[CheckpointedEvents],
) -> pa.RecordBatch:
    """Return the events of the batches as rows. `sequence` is the number of the first event."""
    events = [event for batch in batches for event in batch.events]
    builder = RowBuilder(
        target.partition,
        target.depth,
        sequence,
        options.payload,
        [(len(batch.events), batch.cursor) for batch in batches],
        connection.url if options.feed_column else None,
    )
    v1 = connection.info.dialect == "v1"
    headers = [orjson.dumps(event.headers) for event in events] if v1 else None
    return builder.build(b"\n".join([event._payload for event in events]), headers)
