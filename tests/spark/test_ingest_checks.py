"""What ``feedapi ingest`` refuses before it writes, by names, places and SQL; and what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from feedapi_client.spark import OptionError
from feedapi_client.spark.ingest import (
    Ingest,
    IngestError,
    MicroBatchError,
    parquet_table,
    plain_message,
)
from feedapi_client.spark.ingest.ingest_table import Identity
from feedapi_client.spark.ingest.job import as_url
from feedapi_client.spark.ingest.parquet_table import ParquetTable, open_folder
from feedapi_client.testing import Publisher
from tests.spark.slow_workers import run
from tests.spark.test_ingest import job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=1, page_size=5, checkpoint_every=5)
    publisher.append(0, {"id": "a", "n": 1, "N": "one", "day": "2026-11-25"})
    with publisher.serve():
        yield publisher


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, str(before))


def written(folder: Path) -> list[Path]:
    return [file for file in folder.glob("**/*.parquet") if "_feedapi" not in str(file)]


# ---------------------------------------------------------------------- before the start

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schema": "n INTT"}, r"schema 'n INTT' can't be parsed: .*INTT"),
    ({"schema": "n INT", "gold": "g", "key": ["k"]}, "MERGE"),
    ({"schema": "t TIMESTAMP(9)"}, r"can't be parsed: .*timestampNanosTypes"),
    ({"schema": "m MAP<DATE, INT>"}, "can't be read from JSON: .*MAP"),
    ({"schema": "a ARRAY<VARCHAR(3)>"}, r"can't be read from JSON: .*char/varchar"),
    ({"schema": "id STRING, ID INT"}, "can't be read from JSON: .*AMBIGUOUS.*`id`"),
    ({"schema": "s ARRAY<STRUCT<a: INT, A: INT>>"}, "can't be written: .*COLUMN_ALREADY_EXISTS"),
    ({"schema": "Feed STRING"}, "can't be written: .*`feed`"),
    ({"schema": "Partition STRING"}, "can't be written: .*`partition`"),
    ({"schema": "data STRING"}, "can't be written: .*`data`"),
    ({"schema": "_corrupt STRING"}, "can't be written: .*`_corrupt`"),
    ({"schema": "i INTERVAL"}, "can't be written: .*INTERVAL"),
    ({"schema": "a ARRAY<INTERVAL>"}, "can't be written: .*INTERVAL"),
    ({"schema": "s STRUCT<>"}, "can't be written: .*EMPTY_SCHEMA"),
    ({"partition_by": ["country"]}, "table can't be written: .*country"),
    ({"partition_by": ["n", "N"], "schema": "n INT"}, "can't be written: .*COLUMN_ALREADY_EXISTS"),
    ({"partition_by": ["day"], "schema": "day ARRAY<INT>"}, r"can't be written: .*ARRAY<INT>"),
    ({"partition_by": ["day"], "schema": "day VARIANT"}, "can't be written: .*VARIANT"),
    ({"partition_by": ["DAY"], "schema": "day TIMESTAMP"}, "not every reader gets the same time"),
    ({"partition_by": ["day"], "schema": "day BINARY"}, "not every reader gets the same binary"),
    ({"writer_options": {"compression": "none at all"}}, "table can't be written: .*none at all"),
    ({"writer_options": {"maxRecordsPerFile": "many"}}, "table can't be written: .*many"),
    ({"writer_options": {"parquet.block.size": "big"}}, "table can't be written: .*big"),
    (
        {"resume_from_table": True, "options": {"startingCursors": "last"}},
        "leave out option startingCursors",
    ),
]


def test_r10_what_can_be_checked_is_refused_in_one_line_before_the_first_batch(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    wrong = []
    for given, message in REFUSED:
        try:
            run(spark, job(publisher, tmp_path, **given))
            wrong.append(f"{given} is not refused")
        except Exception as error:
            if (
                not isinstance(error, IngestError)
                or "\n" in str(error)
                or not re.search(message, str(error))
            ):
                wrong.append(f"{given}: {error}")
    assert not wrong, "\n".join(wrong)
    assert not (tmp_path / "table/_feedapi/checkpoint/offsets").exists()
    assert written(tmp_path / "table") == []
    with pytest.raises(OptionError, match="unknown option urls"):
        run(spark, job(publisher, tmp_path, options={"urls": "x"}))


def test_r10_column_that_differs_in_case_is_the_same_column(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    run(spark, job(publisher, tmp_path, schema="id STRING, n INT"))
    with pytest.raises(IngestError, match="column N was int and would become string"):
        run(spark, job(publisher, tmp_path, schema="id STRING, N STRING"))
    with setting(spark, "spark.sql.caseSensitive", "TRUE"):
        run(spark, job(publisher, tmp_path, schema="id STRING, N STRING"))


def test_r10_columns_that_change_while_a_run_writes_are_compared_and_noted(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    whole, who = job(publisher, tmp_path), Identity("feed", "query")
    table, rows = ParquetTable(whole), spark.range(1).selectExpr("id AS x")
    for made in (rows, rows.selectExpr("x", "1 AS y")):
        table.prepare(made, who, 0)
        table.write(made, who, 0)
    for column in ("'a' AS x", "x, 'a' AS y"):
        for writer in (table, ParquetTable(whole)):
            with pytest.raises(IngestError, match="files of both can't be read as one table"):
                writer.prepare(rows.selectExpr(*column.split(", ")), who, 2)


# ---------------------------------------------------------------------- transforms

DELTA: dict[str, Any] = {"format": "delta", "output": "t", "checkpoint": "/c", "staging": "/s"}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("'x' AS Feed", "table can't be written: .*feed"),
        ("7 AS batch", "table can't be written: .*batch"),
        ("1 AS ID", "table can't be written: .*COLUMN_ALREADY_EXISTS"),
        ("'x' COLLATE UTF8_LCASE AS day", "table can't be written: .*COLLATE"),
        ("current_timestamp() AS day", "not every reader gets the same timestamp"),
    ],
)
def test_columns_that_a_transform_must_not_make_are_refused_before_anything_is_written(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, column: str, message: str
) -> None:
    tables = {"bronze": str(tmp_path / "bronze"), "rejected": str(tmp_path / "rejected")}
    pipeline = {"schema": "id STRING", "partition_by": ["day"] if "day" in column else [], **tables}

    def transform(rows: DataFrame, number: int) -> DataFrame:
        return rows.selectExpr("*", column)

    with pytest.raises(MicroBatchError, match=message):
        run(spark, job(publisher, tmp_path, transform=transform, **pipeline))
    assert list(tmp_path.glob("**/_feedapi/attempts")) == []
    if column == "7 AS batch":  # nothing was noted that can't be changed
        pipeline |= {"schema": "id STRING, day STRING", "partition_by": ["day"]}
        assert run(spark, job(publisher, tmp_path, **pipeline)).rows == 1


def test_write_that_fails_notes_nothing(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    def fails(rows: DataFrame, _: int) -> DataFrame:
        return rows.selectExpr("*", "raise_error('odd') AS odd")

    with pytest.raises(MicroBatchError, match="odd"):
        run(spark, job(publisher, tmp_path, schema="id STRING", transform=fails))
    assert not (tmp_path / "table/_feedapi/columns").exists()
    assert run(spark, job(publisher, tmp_path, schema="id INT")).rows == 1


# ---------------------------------------------------------------------- places


NO_PLACES = [f"/tmp/{name}" for name in ("a[1]", "a{b}", "a*", "a?", "a\\b", "a\nb", "a:b")]
NO_PLACES += ["FILE:/tmp/t", "File:///tmp/t", "S3://b/t", "file://host/tmp/t"]


@pytest.mark.parametrize("path", NO_PLACES)
def test_path_that_is_a_pattern_or_names_no_file_system_is_refused(
    tmp_path: Path, path: str
) -> None:
    for place in ("output", "bronze", "checkpoint", "staging"):
        given: Any = {"output": str(tmp_path / "t"), "schema": "id INT", place: path}
        with pytest.raises(IngestError, match=f"{place} .* can't be read back"):
            Ingest(url="http://x/feed", **given)


@pytest.mark.parametrize("name", ["a b%20c#Ärger'd,e&f+g;h", "day=1"])
def test_path_of_any_other_name_is_written_and_read_with_the_options_of_the_writer(
    spark: SparkSession,
    publisher: Publisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Also where what nobody reads any more can't be deleted."""

    def refuses(*_: Any) -> None:
        raise PermissionError("delete")

    monkeypatch.setattr(type(open_folder(tmp_path.as_uri())), "delete", refuses)
    for _ in range(2):
        publisher.append(0, {"id": "b"})
        more = {"schema": "id STRING", "writer_options": {"compression": "gzip"}}
        run(spark, job(publisher, tmp_path / name, **more))
    assert spark.read.parquet(str(tmp_path / name / "table")).count() == 3
    files = written(tmp_path / name / "table")
    assert [file.name.endswith(".gz.parquet") for file in files] == [True, True]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bronze": "/lake/t/"}, "must be different tables"),
        ({"bronze": "file:/lake/t"}, "must be different tables"),
        ({"bronze": "/lake/t/bronze"}, "bronze lies inside of output"),
        ({"rejected": "/lake"}, "output lies inside of rejected"),
        ({"checkpoint": "/lake/t/checkpoint"}, "checkpoint lies inside of output"),
        ({"staging": "file:///lake/t"}, "staging lies inside of output"),
        ({"partition_by": [".day"]}, "must not begin with a dot, which hides"),
        ({"prefix": "."}, "a dot, which hides"),
        ({"prefix": "a/b"}, "prefix not hold any of"),
        ({"prefix": "a="}, "prefix not hold any of"),
        ({"feed": "ø" * 130}, "feed's name names a folder, of at most 255 bytes"),
        ({"feed": "x" * 245, "prefix": "feed__"}, "names a folder, of at most 255 bytes"),
        ({"feed": "__HIVE_DEFAULT_PARTITION__"}, "__HIVE_DEFAULT_PARTITION__ is read as NULL"),
        ({"writer_options": {"partitionOverwriteMode": "dynamic"}}, "set by the pipeline"),
        ({"writer_options": {"ReplaceWhere": "true"}}, "set by the pipeline"),
        ({**DELTA, "output": "delta.`/lake/t`"}, "output delta.`/lake/t` is a path, and format"),
        ({"options": {"endingCursors": '{"0": "c"}'}}, "leave out option endingCursors"),
        (
            {"append": True, "options": {"startingCursors": '{"0": "c"}'}},
            "--append .* leave out option startingCursors",
        ),
    ],
)
def test_places_and_options_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(IngestError, match=message):
        Ingest(**{"url": "http://x/feed", "output": "/lake/t", "schema": "id INT", **given})


def test_r10_folder_is_the_same_in_all_its_spellings(tmp_path: Path) -> None:
    (tmp_path / "my lake").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "my lake")
    place = f"{tmp_path}/my lake/t"
    for other in (f"file://{place}/", f"file:{tmp_path}/my lake/./t", f"file://{tmp_path}/link/t"):
        with pytest.raises(IngestError, match="must be different tables"):
            Ingest(url="http://x/feed", output=place, bronze=other, schema="id INT")
        urls = [Ingest(url="http://x/f", output=each).checkpoint_url for each in (place, other)]
        assert urls[0] == urls[1]
    # As in Spark, where % is itself.
    assert as_url(f"file://{tmp_path}/my%20lake") != as_url(f"{tmp_path}/my lake")
    assert as_url("dbfs:/t/") == "dbfs:/t"
    assert as_url("s3a://lake/t") == as_url("s3://lake/t")


def test_own_files_may_lie_in_a_hidden_folder_of_the_table() -> None:
    places = {"checkpoint": "/lake/t/_own/c", "staging": "file:///lake/t/.staging"}
    assert Ingest(url="http://x/feed", output="/lake/t", **places).checkpoint == "/lake/t/_own/c"


# ---------------------------------------------------------------------- what is said


class RefusedError(Exception): ...


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda df, n: df.where("n +"), r"^ParseException: \[PARSE_SYNTAX_ERROR\] .*"),
        (lambda df, n: df.where("amuont > 1"), r"^AnalysisException: \[UNRESOLVED_COLUMN.*amuont"),
        (lambda df, n: _raise(RefusedError("\n\n  by us\nand more")), r"^RefusedError: by us$"),
        (lambda df, n: _raise(RefusedError()), r"^RefusedError$"),
        (lambda df, n: _raise(KeyError("x")), r"^KeyError: 'x'$"),
        (lambda df, n: df.selectExpr("*", "raise_error('odd')"), r"odd"),
        (lambda df, n: _raise(SystemExit(3)), r"^the transform raised SystemExit 3$"),
    ],
)
def test_cause_of_an_error_is_one_line(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, transform: Any, message: str
) -> None:
    with pytest.raises(MicroBatchError, match=message) as caught:
        run(spark, job(publisher, tmp_path, schema="id STRING", transform=transform))
    assert "\n" not in str(caught.value)


def test_of_several_writers_of_a_file_one_is_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path.as_uri())

    def first(name: str, *texts: str) -> str:
        for text in texts:
            folder.create(f"places/{name}", text)
        return folder.read(f"places/{name}")

    assert first("0", "one", "two") == "one"

    def fails(*_: Any) -> None:
        raise PermissionError("not here")

    with monkeypatch.context() as patched:
        patched.setattr(parquet_table.os, "link", fails)  # a file system without links
        assert first("1", "two", "one") == "two"
        patched.setattr(Path, "write_text", fails)  # a full disk
        with pytest.raises(PermissionError):
            folder.create("places/2", "three")
    assert folder.names("places") == {"0", "1"}


def test_error_without_text_is_its_type() -> None:
    assert plain_message(ValueError()) == "ValueError"
    assert plain_message(ValueError("\n\n one\ntwo")) == "one"
    raised = "Traceback (most recent call last):\n  File ...\n__main__.Odd:{} \nSQLSTATE: 39000\n"
    assert plain_message(ValueError(raised.format(""))) == "Odd"
    assert plain_message(ValueError(raised.format(" odd"))) == "Odd: odd"
    assert plain_message(ValueError(raised.format(" SQLSTATE: 1 of"))) == "Odd: SQLSTATE: 1 of"
