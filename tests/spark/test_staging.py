"""Staged objects: created once, whole or not at all, their headers read alone."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.spark.staging import (
    MissingObjectError,
    Section,
    Staging,
    StagingError,
    compress,
    decompress,
    decompress_lines,
    open_store,
    pack,
    unpack,
)


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(tmp_path.as_uri(), "run")


def test_the_first_writer_wins(staging: Staging) -> None:
    assert staging.create("run/x", b"first")
    assert not staging.create("run/x", b"second")
    assert staging.read("run/x") == b"first"


def test_of_many_writers_at_once_exactly_one_wins(staging: Staging) -> None:
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


def test_a_missing_object_is_said_to_be_missing(staging: Staging) -> None:
    assert not staging.exists("run/x")
    for read in (staging.read, staging.read_header):
        with pytest.raises(MissingObjectError, match="run/x is not there"):
            read("run/x")


@pytest.mark.parametrize("size", [0, 10, 70_000, 300_000])
def test_a_header_of_any_length_is_read_alone(staging: Staging, size: int) -> None:
    header = {"partitions": "x" * size}
    staging.create("run/x", pack(header, [[b"body" * 1000]]))
    assert staging.read_header("run/x") == header


@pytest.mark.parametrize("cut", [0, 3, 11, 40, -1])
def test_a_torn_object_is_a_loud_error(staging: Staging, cut: int) -> None:
    whole = pack({"n": 1}, [[compress(b"some lines\n" * 100)]])
    staging.create("run/x", whole[:cut])
    with pytest.raises(StagingError, match="run/x is torn"):
        unpack(staging.read("run/x"), "run/x")


def test_a_damaged_section_is_a_loud_error() -> None:
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
def test_lines_come_back_whole_in_pieces_of_any_size(lines: list[bytes], size: int) -> None:
    section = Section()
    for line in lines:
        section.add(line)
    pieces = list(decompress_lines(memoryview(b"".join(section.finish())), "key", size))
    assert b"".join(pieces) == b"".join(lines)
    assert all(piece.endswith(b"\n") for piece in pieces)


def test_only_earlier_epochs_of_the_own_run_are_deleted(staging: Staging, tmp_path: Path) -> None:
    other = Staging(staging.location, "other")
    for one in (staging, other):
        for epoch in range(4):
            one.create(one.plan_key(epoch), b"plan")
            one.create(one.data_key(epoch, 0), b"data")
    assert staging.discard_before(2) == 4
    assert [staging.exists(staging.plan_key(epoch)) for epoch in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert all(other.exists(other.data_key(epoch, 0)) for epoch in range(4))


def test_a_staging_travels_to_executors(staging: Staging) -> None:
    staging.create("run/x", b"here")
    assert pickle.loads(pickle.dumps(staging)).read("run/x") == b"here"


def test_r19_a_location_that_cannot_be_opened_is_not_quoted() -> None:
    with pytest.raises(StagingError) as caught:
        open_store("nosuch://user:hunter2@bucket/x?sig=hunter2")
    assert "hunter2" not in str(caught.value)
