"""``feedapi cursors ls --checkpoint``: where a query stands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from feedapi_client.testing import Publisher
from tests.cli.invoke import invoke
from tests.spark.conftest import needs_jvm

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, needs_jvm]


def positions(*options: object) -> list[Any]:
    """Return the id, cursor and status of each partition, for each feed of the query."""
    result = invoke(["cursors", "ls", "--json", *map(str, options)])
    assert result.exit_code == 0, result.output
    names = ("partition", "cursor", "status")
    feeds = orjson.loads(result.stdout)["feeds"]
    return [[tuple(row[name] for name in names) for row in feed["positions"]] for feed in feeds]


def test_positions_of_a_query_are_behind_its_last_committed_batch(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEEDAPI_STORE", "cursors.db")  # a checkpoint is meant, where one is given
    staging, checkpoint = tmp_path / "staging", tmp_path / "checkpoint"
    one, two = Publisher(2), Publisher(1)
    one.extend(0, [{"n": n} for n in range(5)])
    two.extend(0, [{"n": n} for n in range(3)])

    def load(url: str) -> DataFrame:
        reader = spark.readStream.format("feedapi").option("url", url)
        return reader.option("stagingLocation", str(staging)).load()

    with one.serve() as url, two.serve() as other:
        rows = load(url).union(load(other)).writeStream.format("noop")
        query = rows.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        query.start().awaitTermination()
        lag = positions(url, "--lag", "--checkpoint", checkpoint, "--staging", staging)
    ends = [[(0, one.end_cursor(0), "open"), (1, one.end_cursor(1), "open")]]
    assert lag == ends
    ends.append([(0, two.end_cursor(0), "open")])
    where = ("--checkpoint", checkpoint, "--staging", staging)
    assert positions(*where) == ends
    assert positions(*where, "-p", 1) == [ends[0][1:], []]
    (commit,) = (checkpoint / "commits").glob("[0-9]*")
    commit.unlink()
    assert [feed[0] for feed in positions(*where)] == [(0, "_first", "open")] * 2


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "there is no such folder"),
        ({"metadata": ""}, "no query ran with this checkpoint"),
        (
            {"offsets/0": 'v1\n{}\n{"topic":{"0":5}}\n-\n{"run":"0123","epoch":0}'},
            "--staging takes the query's stagingLocation",
        ),
    ],
)
def test_what_is_no_checkpoint_is_an_error_and_is_not_created(
    tmp_path: Path, files: dict[str, str], says: str
) -> None:
    pytest.importorskip("feedapi_client.spark")
    checkpoint, staging = tmp_path / "checkpoint", tmp_path / "staging"
    for name, text in files.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text(text)
    where = ("--checkpoint", str(checkpoint), "--staging", str(staging))
    result = invoke(["cursors", "ls", *where])
    assert (result.exit_code, says in result.stderr) == (1, True), result.output
    assert checkpoint.exists() is bool(files)
