"""Staged objects: created once, whole or not at all, with headers that are read on their own."""

from __future__ import annotations

import os
import pickle
import struct
import threading
import tracemalloc
import zlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.spark.plan.epoch import decode
from feedapi_client.spark.source_options import OptionError
from feedapi_client.spark.staging import format as staged_format
from feedapi_client.spark.staging import location
from feedapi_client.spark.staging.first_fetch import rows_of
from feedapi_client.spark.staging.format import (
    Section,
    compress,
    decompress,
    decompress_lines,
    pack,
    unpack,
)
from feedapi_client.spark.staging.location import Staging, default_location, open_store
from feedapi_client.spark.staging.runs import delete_run, staged_runs
from feedapi_client.spark.staging.staging_errors import MissingObjectError, StagingError


def test_a_location_can_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    staging = Staging("a folder", "a" * 32)
    assert staging.create(staging.plan_key(0), b"{}")
    assert list(staged_runs(str(tmp_path / "a folder"))) == ["a" * 32]


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(tmp_path.as_uri(), "run")


def test_the_first_writer_wins(staging: Staging) -> None:
    assert staging.create("run/x", b"first")
    assert not staging.create("run/x", b"second")
    assert staging.read("run/x") == b"first"


def test_exactly_one_of_many_concurrent_writers_wins(staging: Staging) -> None:
    for attempt in range(20):
        won: list[bytes] = []
        barrier = threading.Barrier(8)

        def write(
            number: int,
            key: str = f"run/{attempt}",
            won: list[bytes] = won,
            barrier: threading.Barrier = barrier,
        ) -> None:
            content = bytes([number]) * 100_000
            barrier.wait()
            if staging.create(key, content):
                won.append(content)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [staging.read(f"run/{attempt}")]


def test_missing_object_is_an_error_of_its_own(staging: Staging) -> None:
    assert not staging.exists("run/x")
    for read in (staging.read, staging.read_header):
        with pytest.raises(MissingObjectError, match="run/x is not there"):
            read("run/x")


@pytest.mark.parametrize("size", [0, 10, 70_000, 300_000])
def test_header_of_any_length_is_read_on_its_own(staging: Staging, size: int) -> None:
    header = {"partitions": "x" * size}
    staging.create("run/x", pack(header, [[b"body" * 1000]]))
    assert staging.read_header("run/x") == header


@pytest.mark.parametrize("cut", [0, 3, 11, 40, -1])
def test_torn_object_is_an_error(staging: Staging, cut: int) -> None:
    whole = pack({"n": 1}, [[compress(b"some lines\n" * 100)]])
    staging.create("run/x", whole[:cut])
    with pytest.raises(StagingError, match="run/x is torn"):
        unpack(staging.read("run/x"), "run/x")


def test_damaged_section_is_an_error() -> None:
    section = bytearray(compress(b"some lines\n" * 1000))
    section[-2] ^= 0xFF
    with pytest.raises(StagingError, match="torn"):
        decompress(memoryview(section), "key")


@given(
    st.lists(
        st.binary(max_size=200).map(lambda line: line.replace(b"\n", b"") + b"\n"), max_size=50
    ),
    st.integers(1, 300),
)
def test_pieces_of_any_size_hold_whole_lines(lines: list[bytes], size: int) -> None:
    section = Section()
    for line in lines:
        section.add(line)
    pieces = list(decompress_lines(memoryview(b"".join(section.finish())), "key", size))
    assert b"".join(pieces) == b"".join(lines)
    assert all(piece.endswith(b"\n") for piece in pieces)


_RESULT = {"partition": 0, "events": 2, "depth": 0, "sequence": 0}


def _staged(events: bytes, checkpoints: bytes = b'[[2,"a"]]', header: Any = _RESULT) -> bytes:
    return pack([header], [[compress(checkpoints)], [compress(events)], []])


@pytest.mark.parametrize(
    "staged",
    [
        _staged(b"{}\n" * (32 << 20)),
        _staged(b" " * (96 << 20) + b"\n"),
        _staged(b"{}\n{}\n", b"[" + b" " * (96 << 20) + b"]"),
    ],
    ids=["events", "a line", "checkpoints"],
)
def test_r16_an_object_that_inflates_beyond_what_it_says_is_an_error(
    staged: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_format, "MOST_INFLATED", 16 << 20)
    assert len(staged) < 32_000
    tracemalloc.start()
    try:
        with pytest.raises(StagingError, match="run/x is torn or damaged"):
            list(rows_of(staged, "run/x", 1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "staged",
    [
        _staged(b"{}\n{}\n", header={}),
        _staged(b"{}\n{}\n", header=[1]),
        _staged(b"{}\n{}\n", header=_RESULT | {"partition": "x"}),
        _staged(b"{}\n{}\n", b"{}"),
        _staged(b"{}\n{}\n", b"[[1]]"),
        _staged(b"{}\n{}\n", b'[["x", 2]]'),
        _staged(b"{}\n{}\n", b"no JSON"),
        _staged(b"{}\n"),
        _staged(b"{}\n{}\n{}\n"),
        pack([_RESULT], [[compress(b"[]")]]),
        pack({}, []) + b"more",
    ],
    ids=[
        *("no header", "a number", "a partition", "an object", "no cursor", "other types"),
        *("no JSON", "too few", "too many", "no sections", "more bytes"),
    ],
)
def test_an_object_damaged_behind_a_valid_checksum_is_an_error(staged: bytes) -> None:
    with pytest.raises(StagingError, match="staged object run/x"):
        list(rows_of(staged, "run/x", 1 << 20))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"version":"x"}', b'{"version":1}'], ids=str
)
def test_a_plan_damaged_behind_a_valid_checksum_is_an_error(content: bytes) -> None:
    with pytest.raises(StagingError, match="run/plan is torn or damaged"):
        decode(pack({"kind": "plan"}, [[compress(content)]]), "run/plan")
    with pytest.raises(StagingError, match="run/plan is torn or damaged"):
        decode(pack({"kind": "plan"}), "run/plan")


def test_a_header_damaged_behind_a_valid_checksum_is_an_error() -> None:
    for text in (b"[]", b'{"header":1}', b'{"header":1,"sections":"x"}', b"no JSON"):
        head = struct.pack("<4sII", b"FAS1", len(text), zlib.crc32(text))
        with pytest.raises(StagingError, match="run/x is torn or damaged"):
            unpack(head + text, "run/x")


def test_only_earlier_epochs_of_the_same_run_are_deleted(staging: Staging, tmp_path: Path) -> None:
    other = Staging(staging.location, "other")
    for one in (staging, other):
        for epoch in range(4):
            one.create(one.plan_key(epoch), b"plan")
            one.create(one.data_key(epoch, 0), b"data")
    assert staging.delete_before(2) == 4
    assert [staging.exists(staging.plan_key(epoch)) for epoch in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert all(other.exists(other.data_key(epoch, 0)) for epoch in range(4))


def test_staging_is_picklable(staging: Staging) -> None:
    staging.create("run/x", b"here")
    assert pickle.loads(pickle.dumps(staging)).read("run/x") == b"here"


def test_r19_error_of_a_location_that_cannot_be_opened_hides_its_url() -> None:
    for scheme in ("nosuch", "s3", "gs", "https"):
        with pytest.raises(StagingError) as caught:
            open_store(f"{scheme}://user:hunter2@[bucket/x?sig=hunter2")
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("dbfs:/staging", "dbfs: is a file system of the JVM"),
        ("hdfs://namenode/staging", "hdfs: is a file system of the JVM"),
        ("memory:///staging", "memory: is not shared by driver and executors"),
        ("ftp://host/staging", "staging locations can't be ftp: URLs"),
        ("file://host/staging", "can't be opened: .*Error: "),
    ],
)
def test_error_of_a_location_that_cannot_be_used_names_the_reason(
    location: str, message: str
) -> None:
    with pytest.raises(StagingError, match=message):
        open_store(location)


def test_runs_that_no_query_uses_are_listed_and_deleted(tmp_path: Path) -> None:
    used, old = (Staging(tmp_path.as_uri(), character * 32) for character in "ab")
    for staging in (used, old):
        staging.create(staging.plan_key(0), b"plan")
        staging.create(staging.data_key(0, 0), b"data")
    (tmp_path / "not-ours").mkdir()
    (tmp_path / "not-ours" / "plan").write_text("plan")
    for path in (tmp_path / old.run).rglob("*"):
        os.utime(path, (0, 0))
    used.keep_alive()
    long_ago = datetime.now(UTC) - timedelta(days=30)
    runs = staged_runs(tmp_path.as_uri())
    assert [run for run, last_used in runs.items() if last_used < long_ago] == [old.run]
    delete_run(tmp_path.as_uri(), old.run)
    assert list(staged_runs(str(tmp_path))) == [used.run]
    assert (tmp_path / "not-ours" / "plan").exists()


def test_runs_of_a_location_that_can_not_be_used_are_an_error() -> None:
    with pytest.raises(StagingError, match="hdfs: is a file system of the JVM"):
        staged_runs("hdfs://x/y")


def test_default_location_is_a_private_folder_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(location.tempfile, "gettempdir", lambda: str(tmp_path))
    assert default_location() == default_location()
    (folder,) = tmp_path.iterdir()
    assert default_location() == folder.as_uri()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_default_location_of_another_user_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(location.tempfile, "gettempdir", lambda: str(tmp_path))
    default_location()
    (folder,) = tmp_path.iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OptionError, match="set option stagingLocation"):
        default_location()
