"""What ``feedapi ingest`` refuses before it writes, by names, places and SQL; and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import DateType, StructType
from pyspark.testing.objects import ExamplePointUDT

from feedapi_client.spark import OptionError
from feedapi_client.spark.ingest import (
    Ingest,
    IngestError,
    MicroBatchError,
    parquet_table,
    plain_message,
    read_table,
)
from feedapi_client.spark.ingest.columns import payload_schema
from feedapi_client.spark.ingest.ingest_table import Identity
from feedapi_client.spark.ingest.names import as_url, in_catalog
from feedapi_client.spark.ingest.parquet_table import ParquetTable, open_folder
from feedapi_client.spark.ingest.requirements import check_rows
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


# ---------------------------------------------------------------------- names of columns


def test_column_that_differs_in_case_is_the_same_column(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    run(spark, job(publisher, tmp_path, schema="id STRING, n INT"))
    with pytest.raises(IngestError, match="column N was int and would become string"):
        run(spark, job(publisher, tmp_path, schema="id STRING, N STRING"))
    with setting(spark, "spark.sql.caseSensitive", "TRUE"):
        run(spark, job(publisher, tmp_path, schema="id STRING, N STRING"))


@pytest.mark.parametrize(
    ("schema", "columns"),
    [
        ("id STRING, ID INT", "id, ID"),
        ("s STRUCT<a: INT, A: INT>", "a, A"),
        ("s ARRAY<STRUCT<a: MAP<STRING, STRUCT<b: INT, B: INT>>>>", "b, B"),
    ],
)
def test_two_columns_of_one_name_are_refused(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, schema: str, columns: str
) -> None:
    with pytest.raises(IngestError, match=f"columns {columns} have the same name"):
        run(spark, job(publisher, tmp_path, schema=schema))
    if schema.startswith("s ARRAY"):
        with setting(spark, "spark.sql.caseSensitive", "true"):
            assert run(spark, job(publisher, tmp_path, schema=schema)).rows == 1


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("_FeedAPI_deleted INT", "columns _FeedAPI_deleted have names"),
        ("Feed STRING", "columns Feed have names"),
        ("_corrupt STRING", "columns _corrupt have names"),
        ("i INTERVAL", "columns i have a type that parquet can't store"),
        ("t TIME", "columns t have a type that parquet can't store"),
        ("a ARRAY<INTERVAL>", "columns a have a type that parquet can't store"),
        ("s STRUCT<v: VOID>", "columns s have a type that parquet can't store"),
        ("s STRUCT<>", "columns s have a type that parquet can't store"),
        ("a ARRAY<GEOGRAPHY(4326)>", r"schema has geography.*, which no JSON is read as"),
        ("m MAP<DATE, INT>", r"schema has map<date,int>, which no JSON is read as"),
        ("a ARRAY<VARCHAR(3)>", r"schema has varchar\(3\), .*take STRING"),
        ("s STRING COLLATE UNICODE_CI", "schema has string collate UNICODE_CI, which no JSON"),
        ("a ARRAY<STRING COLLATE UTF8_LCASE>", "schema has string collate UTF8_LCASE, which no"),
        ("t TIMESTAMP(9)", r"can't be parsed: .*spark\.sql\.timestampNanosTypes\.enabled"),
    ],
)
def test_column_that_a_table_can_not_hold_is_refused(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, schema: str, message: str
) -> None:
    with pytest.raises(IngestError, match=message):
        run(spark, job(publisher, tmp_path, schema=schema))
    assert not (tmp_path / "table/_feedapi/checkpoint").exists()


def test_r10_partition_of_a_folder_is_text_a_number_or_a_date(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    for kind in ["TIMESTAMP", "BINARY", "ARRAY<INT>", "STRUCT<a: INT>", "VARIANT"]:
        given = {"schema": f"day {kind}", "partition_by": ["day"]}
        with pytest.raises(IngestError, match="not every reader gets the same"):
            run(spark, job(publisher, tmp_path, **given))

    def collated(rows: DataFrame, _: int) -> DataFrame:
        return rows.selectExpr("'x' COLLATE UTF8_LCASE AS day")

    with pytest.raises(MicroBatchError, match="not every reader gets the same"):
        run(spark, job(publisher, tmp_path / "own", transform=collated, partition_by=["day"]))
    assert run(spark, job(publisher, tmp_path, schema="day DATE", partition_by=["DAY"])).rows == 1
    written = read_table(spark, str(tmp_path / "table")).select("day")
    assert written.schema[0].dataType == DateType()
    assert written.count() == 1


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


def test_r09_resume_does_not_begin_partitions_without_rows_elsewhere(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    given = {"resume_from_table": True, "options": {"startingCursors": "last"}}
    with pytest.raises(IngestError, match="leave out option startingCursors"):
        run(spark, job(publisher, tmp_path, **given))
    assert not list(tmp_path.glob("**/*.parquet"))


# ---------------------------------------------------------------------- transforms

DELTA: dict[str, Any] = {"format": "delta", "output": "t", "checkpoint": "/c", "staging": "/s"}
GOLD: dict[str, Any] = {"gold": "g", "rejected": "r", "key": ["k"]}


@pytest.mark.parametrize(
    ("transform", "given", "message"),
    [
        (lambda df: df.withColumn("Feed", F.lit("x")), {}, "columns Feed have names of"),
        (lambda df: df.withColumn("batch", F.lit(7)), {}, "columns batch have names of"),
        (lambda df: df.select("*", F.lit(1).alias("ID")), {}, "columns id, ID have the same"),
        (lambda df: df.drop("id"), {"partition_by": ["id"]}, "partition_by names id, which"),
        (lambda df: df, {"partition_by": ["dey"]}, "partition_by names dey, which output"),
        (lambda df: df, {"partition_by": ["id", "ID"]}, "partition_by names a column twice: id"),
        (
            lambda df: df.select(F.array("id").alias("a")),
            {**DELTA, "partition_by": ["a"]},
            "partition_by a: not every reader gets the same array<string>",
        ),
        (
            lambda df: df.select(F.array(F.create_map("id", "day")).alias("k")),
            {**DELTA, **GOLD},
            "key k: no two values of array<map<string,string>> can be compared",
        ),
        (
            lambda df: df.select(F.parse_json("id").alias("k")),
            {**DELTA, **GOLD},
            "key k: no two values of variant can be compared",
        ),
        (
            lambda df: df.sparkSession.createDataFrame(
                [], StructType().add("v", ExamplePointUDT())
            ),
            DELTA,
            "columns v have a type that delta can't store",
        ),
        (
            lambda df: df.selectExpr("array(id COLLATE UTF8_LCASE) AS a"),
            DELTA,
            "columns a have a type that delta can't store",
        ),
    ],
)
def test_columns_that_a_transform_must_not_make(
    spark: SparkSession, transform: Any, given: dict[str, Any], message: str
) -> None:
    made = transform(spark.createDataFrame([], "id STRING, day STRING"))
    with pytest.raises(IngestError, match=message):
        check_rows(
            Ingest(**{"url": "http://x/feed", "output": "/t", "schema": "id INT", **given}), made
        )


def test_what_a_transform_makes_is_checked_before_anything_is_written(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    tables = {"bronze": str(tmp_path / "bronze"), "rejected": str(tmp_path / "rejected")}
    pipeline = {"schema": "id STRING, day STRING", **tables}

    def transform(rows: DataFrame, number: int) -> DataFrame:
        return rows.withColumn("Feed", F.lit("x"))

    with pytest.raises(MicroBatchError, match="columns Feed have names of"):
        run(spark, job(publisher, tmp_path, transform=transform, **pipeline))
    assert list(tmp_path.glob("**/_feedapi/attempts")) == []
    # nothing was noted that can't be changed
    assert run(spark, job(publisher, tmp_path, partition_by=["day"], **pipeline)).rows == 1


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


@pytest.mark.parametrize("name", ["a[1]", "a{b}", "a*", "a?", "a\\b", "a\nb", "a:b"])
def test_path_that_is_a_pattern_is_refused(tmp_path: Path, name: str) -> None:
    check_refused(tmp_path, f"/tmp/{name}")


@pytest.mark.parametrize("url", ["FILE:/tmp/t", "File:///tmp/t", "S3://b/t", "file://host/tmp/t"])
def test_url_that_names_no_file_system_is_refused(tmp_path: Path, url: str) -> None:
    check_refused(tmp_path, url)


def check_refused(tmp_path: Path, path: str) -> None:
    for place in ("output", "bronze", "checkpoint", "staging"):
        given: Any = {"output": str(tmp_path / "t"), "schema": "id INT", place: path}
        with pytest.raises(IngestError, match=f"{place} .* can't be read back"):
            Ingest(url="http://x/feed", **given)


@pytest.mark.parametrize("name", ["a b%20c#Ärger'd,e&f+g;h", "day=1"])
def test_path_of_any_other_name_is_written_and_read(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, name: str
) -> None:
    for _ in range(2):
        found = run(spark, job(publisher, tmp_path / name, schema="id STRING"))
        assert found.uncounted == ""
    assert spark.read.parquet(str(tmp_path / name / "table")).count() == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bronze": "/lake/t/"}, "must be different tables"),
        ({"bronze": "file:/lake/t"}, "must be different tables"),
        ({"bronze": "/lake/t/bronze"}, "bronze lies inside of output"),
        ({"rejected": "/lake"}, "output lies inside of rejected"),
        ({"checkpoint": "/lake/t/checkpoint"}, "checkpoint lies inside of output"),
        ({"staging": "file:///lake/t"}, "staging lies inside of output"),
        ({"partition_by": [".day"]}, "a folder that begins with a dot is hidden"),
        ({"prefix": "."}, "begins names of folders"),
        ({"prefix": "a/b"}, "begins names of folders"),
        ({"prefix": "a="}, "begins names of folders"),
        ({"feed": "ø" * 130}, "too long for a folder"),
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
        leases = [Ingest(url="http://x/f", output=each).lease_name for each in (place, other)]
        assert leases[0] == leases[1]
    # As in Spark, where % is itself.
    assert as_url(f"file://{tmp_path}/my%20lake") != as_url(f"{tmp_path}/my lake")
    assert as_url("dbfs:/t/") == "dbfs:/t"
    assert as_url("s3a://lake/t") == as_url("s3://lake/t")


def test_own_files_may_lie_in_a_hidden_folder_of_the_table() -> None:
    places = {"checkpoint": "/lake/t/_own/c", "staging": "file:///lake/t/.staging"}
    assert Ingest(url="http://x/feed", output="/lake/t", **places).checkpoint == "/lake/t/_own/c"


# ---------------------------------------------------------------------- what is said


def test_options_of_the_source_are_checked_first(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="option urls is gone"):
        run(spark, job(publisher, tmp_path, options={"urls": "x"}))
    assert not (tmp_path / "table").exists()


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
        (lambda df, n: "text", r"^the transform returned a str, not a DataFrame$"),
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


def test_names_that_the_locale_of_java_can_not_spell_are_refused(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    def set_encoding(name: str) -> str:
        called = f"java_method('java.lang.System', 'setProperty', 'sun.jnu.encoding', '{name}')"
        return str(spark.range(1).selectExpr(called).collect()[0][0])

    before = set_encoding("ANSI_X3.4-1968")  # as LANG=C
    try:
        for given in ({"feed": "Öl"}, {"output": str(tmp_path / "Ärger")}):
            with pytest.raises(IngestError, match=r"ANSI_X3.*Set LC_ALL=C\.UTF-8"):
                run(spark, job(publisher, tmp_path, **given))
        assert not list(tmp_path.iterdir())
        assert run(spark, job(publisher, tmp_path)).rows == 1
    finally:
        set_encoding(before)
    assert run(spark, job(publisher, tmp_path / "other", feed="Öl")).rows == 1


def test_error_without_text_is_its_type() -> None:
    assert plain_message(ValueError()) == "ValueError"
    assert plain_message(ValueError("\n\n one\ntwo")) == "one"
    raised = "Traceback (most recent call last):\n  File ...\n__main__.Odd:{} \nSQLSTATE: 39000\n"
    assert plain_message(ValueError(raised.format(""))) == "Odd"
    assert plain_message(ValueError(raised.format(" odd"))) == "Odd: odd"
    assert plain_message(ValueError(raised.format(" SQLSTATE: 1 of"))) == "Odd: SQLSTATE: 1 of"
    unnamed = ValueError("Malformed input or input contains unmappable characters: /t/k=%C3")
    advised = plain_message(unnamed)
    assert advised.count("Set LC_ALL=C.UTF-8 where Spark runs") == 1
    assert plain_message(ValueError(advised)) == advised


# ---------------------------------------------------------------------- a run that is over


def test_run_whose_rows_can_not_be_counted_has_succeeded(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> DataFrame:
        raise RuntimeError("no such file")

    monkeypatch.setattr("feedapi_client.spark.ingest.parquet_table.ParquetTable.batches", fails)
    found = run(spark, job(publisher, tmp_path))
    assert "could not be counted: no such file" in str(found)
    assert len(written(tmp_path / "table")) == 1


def test_rows_of_many_partitions_and_batches_are_counted(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.extend(0, [{"id": f"e{n % 3}", "n": n} for n in range(30)])
    limits = {"options": {"maxEventsPerPartition": "7"}, "partition_by": ["id", "n"]}
    found = run(spark, job(publisher, tmp_path, schema="id STRING, n INT", **limits))
    assert (found.rows, found.uncounted) == (31, "")
    assert found.batches > 2


def test_files_that_nobody_reads_any_more_and_that_can_not_be_deleted_fail_nothing(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise PermissionError("delete")

    monkeypatch.setattr(type(open_folder(tmp_path.as_uri())), "delete", refuses)
    assert run(spark, job(publisher, tmp_path)).rows == 1
    publisher.append(0, {"id": "b"})
    assert run(spark, job(publisher, tmp_path)).rows == 1


# ---------------------------------------------------------------------- options of the format


@pytest.mark.parametrize(
    ("name", "value"),
    [("compression", "none at all"), ("maxRecordsPerFile", "many"), ("parquet.block.size", "big")],
)
def test_r10_writer_option_that_can_not_work_is_refused(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, name: str, value: str
) -> None:
    given: dict[str, Any] = {"schema": "id STRING", "checkpoint": str(tmp_path / "c")}
    with pytest.raises(IngestError, match=f"table can't be written with these columns, {name}: "):
        run(spark, job(publisher, tmp_path, writer_options={name: value}, **given))
    assert not (tmp_path / "c/offsets").exists()
    if name == "compression":
        given["writer_options"] = {"compression": "gzip"}
        assert run(spark, job(publisher, tmp_path, **given)).uncounted == ""
        assert written(tmp_path / "table")


def test_catalog_of_any_name_completes_the_name_of_a_table() -> None:
    def session(catalog: str) -> Any:
        names = {"currentCatalog": lambda: catalog, "currentDatabase": lambda: "`my-schema`"}
        conf = SimpleNamespace(get=lambda name, default: default)
        return SimpleNamespace(catalog=SimpleNamespace(**names), conf=conf)

    assert in_catalog(session("dev-lake"), "orders") == "`dev-lake`.`my-schema`.orders"
    assert in_catalog(session("spark_catalog"), "a.b") == "spark_catalog.a.b"


# ---------------------------------------------------------------------- gold


def test_key_of_gold_is_one_of_the_payload(spark: SparkSession) -> None:
    made = Ingest(url="http://x/feed", schema="id STRING, `n.m` INT", **DELTA, **GOLD)
    with pytest.raises(IngestError, match="key names k, which the schema does not have"):
        payload_schema(spark, made)
    assert payload_schema(spark, replace(made, key=["ID", "n.m"])) is not None
