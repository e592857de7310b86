"""A feed and the Delta tables of one query."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feedapi_client.spark.ingest import Ingest, Summary
from feedapi_client.testing import Publisher
from tests.spark.slow_workers import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = "entity STRING, n INT, gone BOOLEAN"


class Lake:
    """A feed and the tables of one query, which all tests use. They hold what was published."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.publisher = Publisher(partitions=2, page_size=50, checkpoint_every=10, seed=2)
        self._numbers = itertools.count()
        spark.sql(f"CREATE DATABASE lake LOCATION '{folder / 'lake'}'")

    def job(self, **more: Any) -> Ingest:
        return Ingest(
            **{
                "url": str(self.publisher.url),
                "output": "lake.silver",
                "format": "delta",
                "schema": SCHEMA,
                "bronze": "lake.bronze",
                "rejected": "lake.rejected",
                "gold": "lake.gold",
                "key": ["entity"],
                "delete_when": "gone",
                "checkpoint": str(self.folder / "checkpoint"),
                "staging": (self.folder / "staging").as_uri(),
                "options": {"settleTime": "0.5"},
                **more,
            }
        )

    def publish(self, *entities: str, **more: Any) -> None:
        for entity in entities or [f"e{n % 7}" for n in range(30)]:
            event = {"entity": entity, "n": next(self._numbers), **more}
            self.publisher.publish(entity, event)

    def ingest(self, **more: Any) -> Summary:
        return run(self.spark, self.job(**more))

    def check(self) -> None:
        """Compare all tables with what was published."""
        events = self.publisher.payloads()
        bronze = Counter(row[0] for row in self.rows("SELECT data FROM lake.bronze"))
        assert sum(bronze.values()) == len(events)
        assert set(bronze.values()) <= {1}
        fitting = [event for event in events if isinstance(event["n"], int)]
        silver = [row.n for row in self.rows("SELECT n FROM lake.silver")]
        assert sorted(silver) == sorted(event["n"] for event in fitting)
        assert len(self.rows("SELECT 1 FROM lake.rejected")) == len(events) - len(fitting)
        state: dict[str, int] = {}
        for event in fitting:
            state.pop(event["entity"], None)
            if not event.get("gone"):
                state[event["entity"]] = event["n"]
        assert {row.entity: row.n for row in self.rows("SELECT * FROM lake.gold")} == state

    def rows(self, query: str) -> list[Any]:
        return self.spark.sql(query).collect()

    def newest(self, table: str) -> Any:
        """Return the newest commit in the history of a table."""
        return self.rows(f"DESCRIBE HISTORY {table} LIMIT 1")[0]
