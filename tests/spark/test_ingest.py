"""``feedapi ingest``: a feed into a table, exactly once."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from feedapi_client.spark.ingest import (
    Ingest,
    IngestError,
    MicroBatchError,
    Summary,
    ingest_command,
    main,
    plain_message,
    trigger_options,
)
from feedapi_client.spark.ingest.ingest_command import _job, parser
from feedapi_client.spark.ingest.parquet_table import Decisions
from feedapi_client.testing import Publisher
from tests.spark import transforms
from tests.spark.conftest import ROOT
from tests.spark.micro_batches import problems
from tests.spark.python_path import python_path
from tests.spark.sessions import configuration
from tests.spark.slow_workers import SLOW_WORKER, run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=2, page_size=50, checkpoint_every=10, seed=2)
    publish(publisher, 120)
    with publisher.serve():
        yield publisher


def publish(publisher: Publisher, count: int, *, first: int = 0) -> None:
    for n in range(first, first + count):
        entity = f"e{n % 7}"
        publisher.publish(entity, {"entity": entity, "n": n})


def job(publisher: Publisher, tmp_path: Path, **more: Any) -> Ingest:
    options = {"settleTime": "0.5", **more.pop("options", {})}
    given: Any = {"url": publisher.url, "output": str(tmp_path / "table"), **more}
    return Ingest(options=options, **given)


def test_next_run_adds_only_new_events(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    first = run(spark, job(publisher, tmp_path))
    assert (first.rows, first.unparsed) == (120, 0)
    publish(publisher, 30, first=120)
    assert run(spark, job(publisher, tmp_path)).rows == 30
    assert run(spark, job(publisher, tmp_path)).rows == 0
    table = spark.read.parquet(str(tmp_path / "table"))
    assert problems((row.asDict() for row in table.collect()), publisher.payloads()) == []


def test_typed_and_partitioned_table_keeps_events_that_do_not_fit(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.append(0, {"entity": "e0", "n": "not a number"})
    summary = run(
        spark, job(publisher, tmp_path, schema="entity STRING, n INT", partition_by=["entity"])
    )
    assert (summary.rows, summary.unparsed) == (121, 1)
    table = spark.read.parquet(str(tmp_path / "table"))
    assert table.where("_corrupt is null").selectExpr("sum(n) as total").first().total == sum(
        range(120)
    )  # type: ignore[union-attr]
    assert list((tmp_path / "table").glob("feed=*/query=*/batch=0/entity=e3"))


def test_transform_of_the_user(spark: SparkSession, publisher: Publisher, tmp_path: Path) -> None:
    summary = run(
        spark,
        job(
            publisher,
            tmp_path,
            schema="entity STRING, n INT",
            transform=transforms.only_odd,
        ),
    )
    assert summary.batches >= 1
    assert {row.n for row in spark.read.parquet(str(tmp_path / "table")).collect()} == set(
        range(1, 120, 2)
    )


def test_attempt_that_ends_before_it_counts_is_never_seen(
    spark: SparkSession, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_here(*_: object) -> None:
        raise RuntimeError("after the write")

    with monkeypatch.context() as patch:
        patch.setattr(Decisions, "decide", ends_here)
        with pytest.raises(MicroBatchError, match=r"^RuntimeError: after the write$"):
            run(spark, job(publisher, tmp_path))
    assert list((tmp_path / "table").rglob("_feedapi/attempts/*/0/*/part-*"))
    assert not list((tmp_path / "table").glob("feed=*"))
    assert run(spark, job(publisher, tmp_path)).rows == 120
    assert spark.read.parquet(str(tmp_path / "table")).count() == 120
    assert not list((tmp_path / "table").rglob("_feedapi/attempts/*/0"))


def test_output_of_another_query_is_refused(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    run(spark, job(publisher, tmp_path))
    with pytest.raises(IngestError, match=r"is written by query .*, and the checkpoint is not"):
        run(spark, job(publisher, tmp_path, checkpoint=str(tmp_path / "another")))


def test_failure_is_one_line(spark: SparkSession, publisher: Publisher, tmp_path: Path) -> None:
    publisher.bearer = "needed"
    with pytest.raises(MicroBatchError) as caught:
        run(spark, job(publisher, tmp_path))
    text = plain_message(caught.value)
    assert "\n" not in text
    assert text.startswith(f"feed {publisher.url}: the publisher answers status 401")


@pytest.mark.slow
def test_command_of_the_guide_begins_in_an_empty_folder_and_goes_on(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.append(0, {"n": 1})
    command = command_of_the_guide("feedapi ingest https://service/orders /data/orders")
    command = command.replace("https://service/orders", str(publisher.url))
    command = command.replace("/data/", f"{tmp_path}/")
    # What only informs fails nothing.
    full = f"{command} --json > /dev/full 2> told; sed -n 's/.* is done: //p' told"
    first = shell(full, tmp_path)
    assert (first["rows"], first["unparsed"], first["apart"]) == (120, 1, True)
    # A stack trace of Spark's, about no path of the user's.
    assert "/nowhere" not in (tmp_path / "told").read_text()
    publish(publisher, 5, first=120)
    arguments = shlex.split(command.replace("\\\n", ""))[2:]
    given = vars(parser().parse_args(arguments))
    del given["json"], given["conf"]
    second = run(spark, _job(given))
    assert (second.rows, second.unparsed, second.batches) == (5, 0, 1)


def shell(command: str, folder: Path) -> dict[str, Any]:
    """Run a command that prints a summary. What a test needs of Spark is in its own settings."""
    settings = folder / "conf" / "spark-defaults.conf"
    settings.parent.mkdir(exist_ok=True)
    given = {**configuration(), "spark.master": "local[1]"}
    settings.write_text("".join(f"{name} {value}\n" for name, value in given.items()))
    programs = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-euc", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": python_path(),
            "SPARK_CONF_DIR": str(settings.parent),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def command_of_the_guide(begins: str) -> str:
    page = (ROOT / "docs" / "pages" / "lakehouse.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (command,) = [block for block in blocks if block.startswith(begins)]
    return str(command).rstrip()


# ---------------------------------------------------------------------- without a JVM


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("available-now", {"availableNow": True}),
        ("10s", {"processingTime": "10 seconds"}),
        ("500ms", {"processingTime": "500 milliseconds"}),
        ("0.5m", {"processingTime": "30000 milliseconds"}),
        ("1.1h", {"processingTime": "3960000 milliseconds"}),
    ],
)
def test_triggers(text: str, options: dict[str, object]) -> None:
    assert trigger_options(text) == options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (["--trigger", text], "trigger must be available-now or an interval")
            for text in ("sometimes", "1.5ms", "9999999999h", "\u0663s")
        ),
        (
            ["--format", "delta"],
            "format delta writes to a table: say with --checkpoint and --staging",
        ),
        *(
            (["--format", format], f"format must be parquet or delta, not '{format}'")
            for format in ("csv", "orc", "json", "text", "avro", "iceberg", "hudi", "")
        ),
        (["--transform", "no.such.module:f"], "--transform: no.such.module:f can't be imported"),
        (["--transform", "tests..spark:f"], "--transform: tests..spark:f can't be imported"),
        (["--transform", "tests.spark.transforms.clean"], "--transform takes MODULE:FUNCTION, not"),
        (["--option", "authEnv"], "--option takes NAME=VALUE"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["http://service/feed", "/tmp/x", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def clean(rows, number): ...", "format delta writes to a table"),  # it was imported
        ("raise KeyError('secret')", "can't be imported: KeyError in the module (my-job.py, line"),
        ("def clean(", "can't be imported: '(' was never closed (my-job.py, line 1)"),
        ("clean = 7", "my-job:clean is no function"),
    ],
)
def test_transform_is_imported_from_the_current_directory(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my-job", raising=False)
    (tmp_path / "my-job.py").write_text(text)
    arguments = ["http://service/feed", "x", "--format", "delta", "--transform", "my-job:clean"]
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "secret" not in errors


def test_summary_says_what_was_written() -> None:
    assert (
        str(Summary("/data", 3, 1500, 2, 2.0))
        == "1,500 rows, 2 of them not fitting the schema, in 3 micro-batches to /data in "
        "2.0 s, 750 rows/s"
    )
    assert (
        str(Summary("/data", 1, 1, 2, 0.0, apart=True))
        == "1 row and 2 rejected in 1 micro-batch to /data in 0.0 s"
    )


# ---------------------------------------------------------------------- signals


@pytest.fixture
def kept(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """The session, which the command takes and does not stop."""
    monkeypatch.setattr(ingest_command, "_session", lambda conf: spark)
    monkeypatch.setattr(type(spark), "stop", lambda self: None)
    return spark


def test_run_that_a_signal_stopped_says_so_and_has_its_exit_code(
    kept: SparkSession,
    publisher: Publisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(transforms, "only_odd", ends_this_process)
    arguments = [str(publisher.url), str(tmp_path / "table"), "--json"]
    stopped = ["--trigger", "1h", "--transform", "tests.spark.transforms:only_odd"]
    while (code := main([*arguments, *stopped])) == 1:  # a slow worker
        assert SLOW_WORKER in capsys.readouterr().err
    assert code == 128 + signal.SIGTERM
    written, errors = capsys.readouterr()
    assert json.loads(written)["output"] == f"{tmp_path}/table"
    assert "feedapi ingest: SIGTERM stopped the query, and the next run goes on\n" in errors
    run(kept, job(publisher, tmp_path))
    assert kept.read.parquet(str(tmp_path / "table")).count() == 120


def test_error_that_spark_does_not_translate_is_one_line(
    kept: SparkSession, publisher: Publisher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(kept, job(publisher, tmp_path))
    (checksum,) = (tmp_path / "table/_feedapi/checkpoint/feedapi/outputs").rglob(".part-*.crc")
    content = bytearray(checksum.read_bytes())
    content[-1] ^= 1
    checksum.write_bytes(content)
    assert main([str(publisher.url), str(tmp_path / "table")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("feedapi ingest: ")
    assert "hecksum" in line


def ends_this_process(rows: DataFrame, number: int) -> DataFrame:
    os.kill(os.getpid(), signal.SIGTERM)
    return rows
