"""Option ``partitions``: which partitions are read. Imports no Spark."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from feedapi_client.model import FeedInfo
from feedapi_client.spark.options import OptionError, SourceOptions


def check_partitions(options: SourceOptions, info: FeedInfo) -> None:
    """Raise `OptionError` when option ``partitions`` names one that the feed does not list."""
    missing = sorted((options.partitions or frozenset()) - info.partitions.keys())
    if missing:
        raise OptionError(
            f"feedapi source: option partitions names {', '.join(map(str, missing[:8]))}, which "
            "the feed does not list"
        )


def only(info: FeedInfo, partitions: Collection[int]) -> FeedInfo:
    """Return the discovery with these partitions only, as much as a task needs of it."""
    return replace(info, partitions={id: info.partitions[id] for id in partitions})
