"""``feedapi ingest``: a feed into a table, exactly once."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.main import get_command

from feedapi_client.cli import ingest as command
from feedapi_client.cli.command import build
from feedapi_client.spark.ingest import (
    Ingest,
    MicroBatchError,
    Summary,
    plain_message,
    read_table,
    trigger_options,
)
from feedapi_client.testing import Publisher
from tests.cli.invoke import Row, invoke, play
from tests.http.certificates import self_signed
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


def test_each_run_adds_the_new_events_and_counts_them(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.append(0, {"entity": "e0", "n": "not a number"})
    limit = {"maxEventsPerPartition": "40"}
    given: dict[str, Any] = {"schema": "entity STRING, n INT", "partition_by": ["entity"]}
    first = run(spark, job(publisher, tmp_path, options=limit, **given))
    assert (first.rows, first.unparsed, first.apart) == (121, 1, False)
    assert first.batches > 1
    publish(publisher, 30, first=120)
    odd = job(publisher, tmp_path, transform=transforms.only_odd, **given)
    assert run(spark, odd).rows == 30  # that the transform was given
    last = run(spark, job(publisher, tmp_path, **given))
    assert (last.rows, last.batches) == (0, 0)
    table = read_table(spark, str(tmp_path / "table"))
    fitting = table.where("in_batch is null and _corrupt is null").collect()
    events = [event for event in publisher.payloads() if event["n"] in range(120)]
    assert problems((row.asDict() for row in fitting), events) == []
    assert sum(row.n for row in fitting) == sum(range(120))
    later = table.where("in_batch is not null").collect()
    assert {row.n for row in later} == set(range(121, 150, 2))
    assert list((tmp_path / "table").glob("feed=*/query=*/batch=0/entity=e3"))


def test_failure_is_one_line(spark: SparkSession, publisher: Publisher, tmp_path: Path) -> None:
    publisher.bearer = "needed"
    with pytest.raises(MicroBatchError) as caught:
        run(spark, job(publisher, tmp_path))
    text = plain_message(caught.value)
    assert "\n" not in text
    assert text.startswith(f"feed {publisher.url}: the publisher answers status 401")


# ---------------------------------------------------------------------- the command


@pytest.mark.slow
def test_command_of_the_guide_begins_in_an_empty_folder_and_goes_on(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.append(0, {"n": 1})
    guide = command_of_the_guide("feedapi ingest https://service/orders /data/orders")
    guide = guide.replace("https://service/orders", str(publisher.url))
    guide = guide.replace("/data/", f"{tmp_path}/")
    # What only informs fails nothing.
    done = shell(f"{guide} --json > /dev/full", tmp_path)
    said = done.communicate(timeout=500)[1].splitlines()
    assert done.returncode == 0, said
    first = json.loads(said[-1].partition(" is done: ")[2])
    assert (first["rows"], first["unparsed"], first["apart"]) == (120, 1, True)
    assert [line for line in said if line.startswith("\tat ") or "Exception" in line] == []
    publish(publisher, 5, first=120)
    words = shlex.split(guide.replace("\\\n", ""))[2:]
    context: Any = get_command(command.ingest).make_context("ingest", words)
    second = run(spark, build(command._Ingest, context.params).job())
    assert (second.rows, second.unparsed, second.batches) == (5, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "code", "said"),
    [
        ("all", 128 + signal.SIGTERM, "SIGTERM stopped the query, and the next run goes on"),
        ("java", 1, "Java has ended, and the query with it: the next run goes on"),
    ],
)
def test_command_whose_java_ends_says_so_in_one_line(
    publisher: Publisher, tmp_path: Path, to: str, code: int, said: str
) -> None:
    """Systemd and Kubernetes send SIGTERM to all processes."""
    words = f"exec feedapi ingest {publisher.url} {tmp_path}/table --trigger 1s --json"
    process = shell(words, tmp_path)
    while not list(tmp_path.glob("table/_feedapi/checkpoint/commits/0")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    if to == "all":
        os.killpg(process.pid, signal.SIGTERM)
    else:
        os.kill(java_of(process.pid), signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=500)
    assert (process.returncode, stderr.splitlines()[-1]) == (code, f"feedapi: {said}")
    assert "Traceback" not in stderr
    assert stdout.count("\n") == (to == "all")  # the summary, as far as Spark could tell it


def java_of(group: int) -> int:
    """Return the process of a group that is a JVM."""
    for folder in Path("/proc").glob("[0-9]*"):
        name, _, rest = (folder / "stat").read_text().rpartition(") ")
        if name.endswith("(java") and int(rest.split()[2]) == group:
            return int(folder.name)
    raise AssertionError("there is no Java")


def shell(words: str, folder: Path) -> subprocess.Popen[str]:
    """Start a command. What a test needs of Spark is in its own settings."""
    settings = folder / "conf" / "spark-defaults.conf"
    settings.parent.mkdir(exist_ok=True)
    given = {**configuration(), "spark.master": "local[1]"}
    settings.write_text("".join(f"{name} {value}\n" for name, value in given.items()))
    programs = Path(sys.executable).parent
    return subprocess.Popen(
        ["bash", "-euc", words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
        env={
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": python_path(),
            "SPARK_CONF_DIR": str(settings.parent),
        },
    )


def command_of_the_guide(begins: str) -> str:
    page = (ROOT / "docs" / "pages" / "lakehouse.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (command,) = [block for block in blocks if block.startswith(begins)]
    return str(command).rstrip()


# ---------------------------------------------------------------------- without a JVM


@pytest.mark.parametrize("how", ["closes", "resets"])
def test_command_whose_java_ends_before_it_answers_says_so_in_one_line(
    how: str, tmp_path: Path
) -> None:
    def java() -> None:
        with server, server.accept()[0] as connection, connection.makefile("rb") as commands:
            assert [commands.readline(), commands.readline()] == [b"A\n", b"secret\n"]
            connection.sendall(b"!yv\n")
            commands.readline()
            if how == "resets":
                at_once = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=java)
        thread.start()
        submitted = {
            "SPARK_ENV_LOADED": "1",
            "PYSPARK_GATEWAY_PORT": str(server.getsockname()[1]),
            "PYSPARK_GATEWAY_SECRET": "secret",
        }
        done = subprocess.run(
            [Path(sys.executable).parent / "feedapi", "ingest", "http://feed.test/", tmp_path],
            env={**os.environ, **submitted},
            capture_output=True,
            text=True,
            check=False,
        )
        thread.join()
    said = "feedapi: Java has ended, and the query with it: the next run goes on\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("available-now", {"availableNow": True}),
        ("10s", {"processingTime": "10000 milliseconds"}),
        ("500ms", {"processingTime": "500 milliseconds"}),
        ("0.5m", {"processingTime": "30000 milliseconds"}),
        ("1.1h", {"processingTime": "3960000 milliseconds"}),
    ],
)
def test_triggers(text: str, options: dict[str, object]) -> None:
    assert trigger_options(text) == options


FEED = "ingest http://service/feed /tmp/x"
WRONG = [
    *(
        (f"{FEED} --trigger {text}", "trigger must be available-now or an interval")
        for text in ("sometimes", "1.5ms", "9999999999h", "\u0663s")
    ),
    *(
        (f"{FEED} --format '{text}'", f"format must be parquet or delta, not '{text}'")
        for text in ("csv", "orc", "json", "text", "avro", "iceberg", "hudi", "")
    ),
    (
        f"{FEED} --format delta",
        "format delta writes to a table: say with --checkpoint and --stagin",
    ),
    (f"{FEED} --transform no.such.module:f", "--transform: no.such.module:f can't be imported"),
    (f"{FEED} --transform tests..spark:f", "--transform: tests..spark:f can't be imported"),
    (f"{FEED} --transform tests.spark.transforms", "--transform takes MODULE:FUNCTION, not"),
    (f"{FEED} --option authEnv", "'--option': takes NAME=VALUE, not 'authEnv'"),
    (f"{FEED} --schema 'id INT' --gold g --key id", "MERGE, which format parquet can't"),
    (f"{FEED} --key id", "key and delete_when describe gold"),
    (f"{FEED} --bronze b", "bronze and rejected need a schema"),
    (f"{FEED} --schema 'id INT' --bronze /tmp/x", "must be different tables"),
    *(
        (f"{FEED} --{name}=", f"{name.replace('-', '_')} is empty: leave it out, or was a variable")
        for name in [
            "schema",
            "bronze",
            "rejected",
            "gold",
            "feed",
            "key",
            "delete-when",
            "checkpoint",
            "staging",
            "partition-by",
        ]
    ),
    (
        "ingest http://service/feed ''",
        "output is empty: leave it out, or was a variable to be set?",
    ),
    ("ingest '' /tmp/x", "'URL': "),
    (f"{FEED} --transform=", "--transform takes MODULE:FUNCTION, not ''"),
    (f"{FEED} --ca-file=", "'--ca-file': "),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_arguments_are_one_line_and_exit_code_2(words: str, message: str) -> None:
    play([Row(words, 2, message)])


def test_arguments_of_the_command_are_those_of_a_pipeline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "url": "http://service/feed",
        "output": "lake.t",
        "format": "delta",
        "schema": "id STRING",
        **{name: f"lake.{name}" for name in ("bronze", "rejected", "gold")},
        "key": ["id", "n"],
        "delete_when": "gone",
        "feed": "orders",
        "append": True,
        "prefix": "x_",
        "keep_data": False,
        "partition_by": ["day"],
        "trigger": "5m",
        "transform": transforms.only_odd,
        "checkpoint": "/c",
        "staging": "/s",
        "options": {"a": "1=2", "b": ""},
        "writer_options": {"c": "3"},
    }
    jobs: list[Ingest] = []
    trusted = self_signed(tmp_path, "service").path
    monkeypatch.setattr(command, "_session", lambda conf: conf)
    monkeypatch.setattr(
        command, "_run_until_signal", lambda _, job: jobs.append(job) or (None, None)
    )
    play(
        [
            Row(
                "ingest http://service/feed lake.t --format delta --schema 'id STRING' "
                "--bronze lake.bronze --rejected lake.rejected --gold lake.gold --key id --key n "
                "--delete-when gone --feed orders --append --prefix x_ --no-data "
                "--partition-by day --trigger 5m --transform tests.spark.transforms:only_odd "
                "--checkpoint /c --staging /s --option a=1=2 --option b= --writer-option c=3"
            ),
        ]
    )
    monkeypatch.setenv("FEEDAPI_CA_FILE", str(trusted))
    monkeypatch.setenv("FEEDAPI_URL", "http://service/feed")
    play([Row("ingest t --checkpoint /c --resume-from-table")])
    assert jobs[0] == Ingest(**given)
    own: Any = {"checkpoint": "/c", "resume_from_table": True, "options": {"caFile": str(trusted)}}
    assert jobs[1] == Ingest(url="http://service/feed", output="t", **own)


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my-job", raising=False)
    (tmp_path / "my-job.py").write_text(text)
    row = Row("ingest http://service/feed x --format delta --transform my-job:clean", 2, message)
    assert "secret" not in play([row]).output


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


# ---------------------------------------------------------------------- in the session


@pytest.fixture
def kept(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """The session, which the command takes and does not stop."""
    monkeypatch.setattr(command, "_session", lambda conf: spark)
    monkeypatch.setattr(type(spark), "stop", lambda self: None)
    return spark


def test_run_that_a_signal_stopped_says_so_and_has_its_exit_code(
    kept: SparkSession, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transforms, "only_odd", ends_this_process)
    words = ["ingest", str(publisher.url), str(tmp_path / "table"), "--json", "--trigger", "1h"]
    words += ["--transform", "tests.spark.transforms:only_odd"]
    while (done := invoke(words)).exit_code == 1:
        assert SLOW_WORKER in done.stderr
    assert done.exit_code == 128 + signal.SIGTERM
    assert json.loads(done.stdout)["output"] == f"{tmp_path}/table"
    assert done.stderr == "feedapi: SIGTERM stopped the query, and the next run goes on\n"
    run(kept, job(publisher, tmp_path))
    assert kept.read.parquet(str(tmp_path / "table")).count() == 120


def test_error_that_spark_does_not_translate_is_one_line(
    kept: SparkSession, publisher: Publisher, tmp_path: Path
) -> None:
    run(kept, job(publisher, tmp_path))
    (checksum,) = (tmp_path / "table/_feedapi/checkpoint/feedapi/outputs").rglob(".part-*.crc")
    content = bytearray(checksum.read_bytes())
    content[-1] ^= 1
    checksum.write_bytes(content)
    play([Row(f"ingest {publisher.url} {tmp_path}/table", 1, "hecksum")])


def ends_this_process(rows: DataFrame, number: int) -> DataFrame:
    os.kill(os.getpid(), signal.SIGTERM)
    return rows
