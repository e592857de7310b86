"""Values of ``feedapi ingest``: written as they were sent, or not at all, in any session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow.parquet as pq
import pytest
from orjson import Fragment
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from feedapi_client.spark.ingest import IngestError, read_table
from feedapi_client.testing import Publisher
from feedapi_client.testing.publisher.faults import Rewrite
from tests.spark.slow_workers import run
from tests.spark.test_dataframe import TOO_DEEP
from tests.spark.test_ingest import job
from tests.spark.test_ingest_checks import setting

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=1)
    with publisher.serve():
        yield publisher


# ---------------------------------------------------------------------- values that change

SOUND: dict[str, list[tuple[Any, str]]] = {
    "TIMESTAMP": [
        (1761955200, "2025-11-01 00:00:00"),
        (-62135596800, "0001-01-01 00:00:00"),
        (0, "1970-01-01 00:00:00"),
        ("2026-11-01T10:00:00Z", "2026-11-01 10:00:00"),
        ("2026-11-01T10:00:00", "2026-11-01 10:00:00"),
        ("2026-11-01T10:00:00+02:00", "2026-11-01 08:00:00"),
        ("2026-11-01", "2026-11-01 00:00:00"),
        ("2026-11-01T10:00:00.123456789Z", "2026-11-01 10:00:00.123456"),
    ],
    "DATE": [("2026-11-01", "2026-11-01"), ("2026-1-1", "2026-01-01")],
    "TIMESTAMP_NTZ": [("2026-11-01 10:00", "2026-11-01 10:00:00")],
    "DECIMAL(10,2)": [(12.34, "12.34"), ("-12.340", "-12.34"), ("1e2", "100.00")],
    "DECIMAL(38,2)": [(Fragment("1" + "0" * 30), "1" + "0" * 30 + ".00")],
    "DECIMAL(38,18)": [
        ("12345678901234567.123456789012345678", "12345678901234567.123456789012345678"),
        (Fragment("12345678901234567890.5"), "12345678901234567890.500000000000000000"),
    ],
    "DOUBLE": [(1.5, "1.5"), (1e300, "1.0E300")],
    "INT": [(7, "7")],
    "STRUCT<at: DATE, n: INT>": [
        ({"at": "2026-11-01", "N": 1, "n": 2}, "{2026-11-01, 2}"),
        ({"at": None}, "{null, null}"),
    ],
    "TINYINT": [(127, "127"), (-128, "-128")],
    "STRING": [
        ("007", "007"),
        (12.5, "12.5"),
        (100.0, "100.0"),
        (Fragment(str(2**200)), str(2**200)),
        ("1.0E20", "1.0E20"),
        ('"Infinity"', '"Infinity"'),
        ({"b": 1.0, "a": [12.5, "x"]}, '{"b":1.0,"a":[12.5,"x"]}'),
        ({"a": "Infinity", "b": 1.5}, '{"a":"Infinity","b":1.5}'),
        (Fragment('{"a": 1, "a": 2}'), '{"a":1,"a":2}'),
        (Fragment(r'"\\\\\ud83d\uDE00"'), "\\\\\U0001f600"),
        (Fragment("12.10"), "12.1"),
        (Fragment("-0.0"), "-0.0"),
    ],
    "VARIANT": [
        ({"a": "Infinity", "b": 1.5}, '{"a":"Infinity","b":1.5}'),
        (Fragment("1e40"), "1.0E40"),
    ],
}
UNSOUND: dict[str, list[Any]] = {
    "TIMESTAMP": [
        1761955200000,
        1761955200000000,
        2**62,
        Fragment("1" + "0" * 40),
        253402300800,
        "1761955200000",
        "10:00:00",
        "T10:00",
        "+12026-01-01",
        "202611",
        "soon",
        "2026",
        "2026-11",
        "9999-12-31T23:59:59-05:00",
        "2026-13-45T10:00:00",
    ],
    "TIMESTAMP_NTZ": ["12026-01-01T00:00:00", "2026-11", "0000-01-01T00:00:00", "2026-11-01T25:61"],
    "DATE": [
        "2026-11",
        "2026-13-45",
        "2026-11-01T23:30:00-05:00",
        "2026-11-01 or later",
        "20261101",
        "+12026-01-01",
    ],
    "DECIMAL(10,2)": [12.345, "12.345", "1,5", 10**9],
    "DECIMAL(38,0)": [0.5],
    "DECIMAL(38,18)": [Fragment("0.1234567890123456789")],
    "STRING": [
        Fragment("100000000000000000000.5"),
        Fragment("1e400"),
        Fragment('{"a": [12345678901234567890.123456789]}'),
        Fragment('{"a": 1e400}'),
        Fragment('{"a": 1, "a": 2, "b": 1.123456789012345678901234}'),
    ],
    "VARIANT": [Fragment("1e400"), Fragment('{"a": [-1e400]}')],
    "DOUBLE": ["NaN", Fragment("1" + "0" * 400), "-Infinity"],
    "INT": [3_000_000_000, 1.5],
    "TINYINT": [128, 255, 256],
    "BIGINT": [Fragment(str(2**63))],
    "FLOAT": [1e39],
    "STRUCT<x: INT NOT NULL, y: INT>": [{"y": 1}],
    "STRUCT<at: TIMESTAMP>": [{"at": 1761955200000000}, {"At": "2026-11-01"}],
    "STRUCT<`a'b.c`: STRUCT<n: INT>>": [{"a'b.c": {"n": "many"}}],
    "ARRAY<INT>": [[1, "many"]],
    "MAP<STRING, INT>": [{"a": "many"}],
    "MAP<STRING, DOUBLE>": [{"a": "Infinity"}],
}
CASES = [(kind, *case) for kind, cases in SOUND.items() for case in cases]
WRONG = [(kind, value) for kind, values in UNSOUND.items() for value in values]


def test_table_without_a_row_is_read(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.append(0, {"code": "x", "n": "many"})
    given: dict[str, Any] = {"schema": "code STRING, n INT", "partition_by": ["code"]}
    summary = run(spark, job(publisher, tmp_path, rejected=str(tmp_path / "rejected"), **given))
    assert (summary.rows, summary.unparsed) == (0, 1)
    table = read_table(spark, str(tmp_path / "table"))
    assert table.count() == 0
    kinds = {("feed", "string"), ("batch", "bigint"), ("code", "string"), ("n", "int")}
    assert kinds <= {(field.name, field.dataType.simpleString()) for field in table.schema}


@pytest.mark.parametrize("rejecting", [True, False])
def test_r05_value_is_written_as_sent_or_not_at_all(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, rejecting: bool
) -> None:
    kinds = list(dict.fromkeys(kind for kind, *_ in [*CASES, *WRONG]))
    schema = ", ".join(f"c{n} {kind}" for n, kind in enumerate(kinds))
    for case in [*CASES, *WRONG]:
        publisher.append(0, orjson.dumps({f"c{kinds.index(case[0])}": case[1]}), entity="c")
    tables = {"rejected": str(tmp_path / "rejected")} if rejecting else {}
    found = run(spark, job(publisher, tmp_path, schema=schema, **tables))
    assert found.unparsed == len(WRONG)
    rows = read_table(spark, str(tmp_path / "table")).orderBy("sequence")
    texts = rows.select(F.coalesce(*(F.col(f"c{n}").cast("string") for n in range(len(kinds)))))
    values = [row[0] for row in texts.collect()]
    expected: list[str | None] = [text for *_, text in CASES]
    assert values == expected + ([] if rejecting else [None] * (len(WRONG)))
    if rejecting:
        reasons = spark.read.parquet(tables["rejected"]).orderBy("sequence").collect()
        wrong = [(case, row.reason) for case, row in zip(WRONG, reasons, strict=False)
                 if not row.reason.startswith(f"c{kinds.index(case[0])} is not ")]  # fmt: skip
        assert wrong == []


def test_r05_column_in_other_letters_than_the_payload_is_told(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.append(0, {"orderId": "o1", "amount": 1})
    publisher.append(0, {"orderid": "o2", "ORDERID": "o3", "Amount": None, "amount": 4})
    rejected = str(tmp_path / "rejected")
    given = {"schema": "orderid STRING NOT NULL, Amount INT", "rejected": rejected}
    summary = run(spark, job(publisher, tmp_path, **given))
    assert (summary.rows, summary.unparsed) == (1, 1)
    assert read_table(spark, str(tmp_path / "table")).collect()[0].orderid == "o2"
    (row,) = spark.read.parquet(rejected).collect()
    assert row.reason == "orderId has other letters than here; orderid is missing"


def test_r10_session_that_would_change_values_is_refused(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    with setting(spark, "spark.sql.legacy.timeParserPolicy", "legacy"):
        with pytest.raises(IngestError, match=r"LEGACY, which changes times"):
            run(spark, job(publisher, tmp_path, schema="c STRING"))
        assert run(spark, job(publisher, tmp_path)).rows == 0


def test_text_is_as_long_as_an_event_may_be(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    size = 20_000_001  # the parser's own limit is one less
    publisher.append(0, {"c": "x" * size})
    given: dict[str, Any] = {"keep_data": False, "options": {"maxLineBytes": str(2 * size)}}
    assert run(spark, job(publisher, tmp_path, schema="c STRING", **given)).unparsed == 0
    (row,) = read_table(spark, str(tmp_path / "table")).select(F.length("c")).collect()
    assert row == (size,)


def test_payload_that_is_not_utf8_is_rejected_and_can_be_read(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.extend(0, [{"c": "MARK"}, {"c": "Bj\u00f6rn"}])
    publisher.fail(Rewrite(lambda body: body.replace(b"MARK", b"Bj\xf8rn")), times=None)
    tables = {name: str(tmp_path / name) for name in ("bronze", "rejected")}
    assert run(spark, job(publisher, tmp_path, schema="c STRING", **tables)).unparsed == 1
    for name, found in {"bronze": 2, "rejected": 1, "table": 1}.items():
        files = (tmp_path / name).glob("feed=*/**/*.parquet")
        data = [text for file in files for text in pq.read_table(file)["data"].to_pylist()]
        assert len(data) == found
        assert ('{"c":"Bj\ufffdrn"}' in data) == (name != "table")
    (row,) = spark.read.parquet(tables["rejected"]).collect()
    assert row.reason == "not UTF-8"


def test_r05_payload_that_spark_finds_too_deep_is_one_that_does_not_fit(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.append(0, {"n": 0})
    publisher.append(0, TOO_DEEP, entity="deep")
    publisher.append(0, {"n": 2})
    summary = run(spark, job(publisher, tmp_path, schema="n INT"))
    assert (summary.rows, summary.unparsed) == (3, 1)
    rows = read_table(spark, str(tmp_path / "table")).orderBy("sequence").collect()
    corrupt = [None, TOO_DEEP.decode(), None]
    assert [(row.n, row["_corrupt"]) for row in rows] == [*zip([0, None, 2], corrupt, strict=True)]


def test_time_without_an_offset_is_the_same_in_every_session(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    try:
        for number, session in enumerate(("UTC", "Asia/Tokyo")):
            spark.conf.set("spark.sql.session.timeZone", session)
            publisher.append(0, {"at": "2026-11-01T10:00:00", "n": number})
            run(spark, job(publisher, tmp_path, schema="at TIMESTAMP"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    table = spark.read.parquet(str(tmp_path / "table"))
    assert table.selectExpr("count(*) AS all", "count(DISTINCT at) AS times").first() == (2, 1)


PARTITIONS = ["007", "7", "1e5", "2026-11-01", "true", "a b/c", "å%2F", "NULL", " 1", "null"]


def test_values_of_partitions_are_read_as_they_were_sent(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    for number, value in enumerate(PARTITIONS):
        publisher.append(0, {"code": value, "n": number, "day": "2026-11-25"})
    given: dict[str, Any] = {"schema": "code STRING, n INT, day DATE", "feed": "07"}
    run(spark, job(publisher, tmp_path, partition_by=["code", "DAY"], **given))
    rows = read_table(spark, str(tmp_path / "table")).orderBy("n").collect()
    assert [row.code for row in rows] == PARTITIONS
    assert {row["DAY"] for row in rows} == {date(2026, 11, 25)}
    assert {row.feed for row in rows} == {"07"}
    with pytest.raises(IngestError, match="is no table of feedapi ingest"):
        read_table(spark, str(tmp_path))


@pytest.mark.parametrize("rejecting", [True, False])
def test_text_that_no_folder_can_be_named_by_is_not_written_as_null(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, rejecting: bool
) -> None:
    longest = "ü" * 122 + "a%b"  # a folder of 255 bytes
    values = ["", "__HIVE_DEFAULT_PARTITION__", "a\0b", "x" * 251, "%" * 84, "sound", longest, None]
    for number, value in enumerate(values):
        publisher.append(0, {"code": value, "n": number})
    given: dict[str, Any] = {"schema": "code STRING, n INT", "partition_by": ["code"]}
    if rejecting:
        given["rejected"] = str(tmp_path / "rejected")
    assert run(spark, job(publisher, tmp_path, **given)).unparsed == 5
    rows = read_table(spark, str(tmp_path / "table")).orderBy("n").collect()
    assert [row.code for row in rows][-3:] == ["sound", longest, None]
    if rejecting:
        [reason] = spark.read.parquet(given["rejected"]).select("reason").distinct().collect()
        assert reason == ("code can't be the name of a folder",)
    else:
        assert [json.loads(row._corrupt)["code"] for row in rows[:5]] == values[:5]


# ---------------------------------------------------------------------- what a session sets

SETTINGS = {
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
    "spark.sql.files.ignoreMissingFiles": "true",
    "spark.sql.files.ignoreCorruptFiles": "true",
    "spark.sql.parquet.mergeSchema": "false",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.ansi.enabled": "false",
    "spark.sql.files.ignoredPathSegmentRegex": "",
    "spark.sql.storeAssignmentPolicy": "STRICT",
    "spark.sql.columnNameOfCorruptRecord": "broken",
    "spark.sql.session.timeZone": "Asia/Tokyo",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    "spark.sql.files.maxRecordsPerFile": "2",
    "spark.sql.shuffle.partitions": "1",
    "mapreduce.output.basename": "_hidden",
}


@pytest.fixture
def odd_session(spark: SparkSession) -> Iterator[SparkSession]:
    before = {name: spark.conf.get(name, None) for name in SETTINGS}
    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    yield spark
    for name, old in before.items():
        if old is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, old)


def test_repeated_batch_is_exact_whatever_the_session_sets(
    odd_session: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    """The driver died between the write and Spark's note of it, at midnight."""
    publisher.extend(0, [{"n": n} for n in range(10)])
    spark = odd_session

    def on(day: str) -> Any:
        tables = {"bronze": str(tmp_path / "bronze"), "rejected": str(tmp_path / "rejected")}
        return job(
            publisher,
            tmp_path,
            schema="n INT, at TIMESTAMP",
            partition_by=["day"],
            transform=lambda rows, number: rows.withColumn("day", F.lit(day)),
            **tables,
        )

    run(spark, on("2026-11-24"))
    for commit in (tmp_path / "table/_feedapi/checkpoint/commits").iterdir():
        commit.unlink()
    run(spark, on("2026-11-25"))
    publisher.append(0, {"n": 10})
    run(spark, on("2026-11-26"))
    rows = read_table(spark, str(tmp_path / "table")).collect()
    assert sorted((row.n, row.day) for row in rows) == [
        *((n, "2026-11-24") for n in range(10)),
        (10, "2026-11-26"),
    ]
    assert read_table(spark, str(tmp_path / "bronze")).count() == 11


def test_table_that_lacks_a_file_is_not_gone_on_from(
    odd_session: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.extend(0, [{"n": n} for n in range(10)])
    run(odd_session, job(publisher, tmp_path))
    for file in (tmp_path / "table").glob("feed=*/**/*.parquet"):
        file.write_bytes(b"not what was written")
    again = {"checkpoint": str(tmp_path / "c"), "staging": (tmp_path / "s").as_uri()}
    with pytest.raises(Exception, match=r"(?i)parquet"):
        run(odd_session, job(publisher, tmp_path, resume_from_table=True, **again))
