"""Staged objects: created once, whole or not at all, never unbounded; and the fence of a query."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.errors import FencedError
from feedapi_client.model import Event
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.spark import schema, staging
from feedapi_client.spark.epoch import decode
from feedapi_client.spark.fetch import FetchResult
from feedapi_client.spark.schema import EVENTS, StagedEvents, event_columns, staged_rows
from feedapi_client.spark.source_options import OptionError
from feedapi_client.spark.staging import (
    Fence,
    MissingObjectError,
    Objects,
    StagingError,
    default_location,
    inflate,
    open_store,
    pack,
)

RESULT: dict[str, Any] = {"partition": 0, "start": "_first", "cursor": "a", "events": 2}
HEAD = RESULT | {"depth": 0, "sequence": 0, "checkpoints": [[2, "a"]]}


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(tmp_path.as_uri(), "run")


def event(payload: bytes, headers: dict[str, Any] | None = None) -> Event:
    return Event(_payload=msgspec.Raw(payload), _headers=headers)


def stream(*batches: pa.RecordBatch, compression: str | None = "zstd", schema: Any = EVENTS) -> Any:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def columns(*payloads: bytes) -> pa.RecordBatch:
    return event_columns([event(payload) for payload in payloads], headers=False)


TWO = columns(b'{"n":1}', b'{"n":2}')


# Objects


def test_a_location_can_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Objects("a folder", "run").create("run/x", b"here")
    assert pickle.loads(pickle.dumps(Objects("a folder", "run"))).get("run/x") == b"here"
    assert (tmp_path / "a folder/run/x").exists()


def test_missing_object_is_an_error_of_its_own(objects: Objects) -> None:
    assert not objects.exists("run/x")
    for read in (objects.get, objects.head):
        with pytest.raises(MissingObjectError, match="run/x is not there"):
            read("run/x")


@pytest.mark.parametrize("size", [0, 10, 70_000, 300_000])
def test_head_of_any_length_is_read_on_its_own(objects: Objects, size: int) -> None:
    objects.create("run/x", pack([RESULT | {"cursor": "x" * size}], [b"body" * 1000]))
    assert objects.head("run/x") == [FetchResult(0, "_first", "x" * size, 2)]


def test_r19_error_of_a_location_hides_its_url_also_in_its_cause(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scheme in ("nosuch", "s3", "gs", "https"):
        with pytest.raises(StagingError) as caught:
            open_store(f"{scheme}://user:hunter2@[bucket/x?sig=hunter2")
        assert "hunter2" not in str(caught.value)

    def fails(*given: Any, **more: Any) -> None:
        raise OSError("https://host/x?sig=hunter2 is gone")

    for name, use in (("put", objects.create), ("get", objects.get), ("delete", objects.delete)):
        monkeypatch.setattr(obstore, name, fails)
        with pytest.raises(StagingError, match="could not") as caught:
            use("run/x", *[b""][: name == "put"])  # type: ignore[operator]
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_r19_an_error_of_any_length_says_what_is_wrong_and_shows_no_url() -> None:
    """Two million letters: looked at once each, or a million times."""
    error = OSError(f"refused https://user:s3cret@host/x {'a' * 2_000_000}")
    assert staging.reason(error, "").startswith("OSError: refused https://… aaa")


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("dbfs:/staging", "staging locations can't be dbfs: URLs: give an s3://"),
        ("hdfs://namenode/staging", "staging locations can't be hdfs: URLs"),
        ("memory:///staging", "staging locations can't be memory: URLs"),
        ("ftp://host/staging", "staging locations can't be ftp: URLs"),
        ("file://host/staging", "can't be opened: .*Error: "),
    ],
)
def test_error_of_a_location_that_cannot_be_used_names_the_reason(
    location: str, message: str
) -> None:
    with pytest.raises(StagingError, match=message):
        open_store(location)


def test_default_location_is_a_private_folder_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(staging.tempfile, "gettempdir", lambda: str(tmp_path))
    assert default_location() == default_location()
    (folder,) = tmp_path.iterdir()
    assert default_location() == folder.as_uri()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OptionError, match="set option stagingLocation"):
        default_location()


# Events


@given(
    st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=20), max_size=8),
    st.integers(1, 500),
    st.booleans(),
)
def test_rows_are_the_events_that_were_staged_byte_for_byte(
    given: list[list[bytes]], batch_bytes: int, headers: bool
) -> None:
    staged = StagedEvents(headers=headers, batch_bytes=batch_bytes)
    names = {"h": "v", "n": 1, "none": None} if headers else None
    expected = []
    for number, payloads in enumerate(given):
        events = [event(payload, names) for payload in payloads]
        staged.add(CheckpointedEvents(events, f"c{number}", sum(map(len, payloads))))
        expected += [(f"c{number}", payload) for payload in payloads]
    head = HEAD | {"events": len(expected), "checkpoints": staged.checkpoints, "sequence": 5}
    batches = list(staged_rows(pack([head], [staged.finish()]), "key"))

    def column(name: str) -> list[Any]:
        return [value for batch in batches for value in batch.column(name).to_pylist()]

    data = [batch.column("data").cast(pa.binary()).to_pylist() for batch in batches]
    assert [payload for one in data for payload in one] == [payload for _, payload in expected]
    assert column("cursor") == [cursor for cursor, _ in expected]
    assert column("sequence") == list(range(5, 5 + len(expected)))
    maps = [("h", "v"), ("n", "1"), ("none", None)] if headers else None
    assert column("headers") == [maps] * len(expected)
    assert all(sum(map(len, one)) <= batch_bytes + 300 * 20 for one in data)


def test_object_that_is_cut_or_damaged_anywhere_is_an_error(objects: Objects) -> None:
    sound = pack([HEAD], [stream(TWO)])
    for position in range(len(sound)):
        damaged = sound[:position] + bytes([sound[position] ^ 0x41]) + sound[position + 1 :]
        for content in (sound[:position], damaged):
            with pytest.raises(StagingError, match="staged object run/x"):
                list(staged_rows(content, "run/x"))
    objects.create("run/x", sound[:40])
    with pytest.raises(StagingError, match="staged object run/x"):
        objects.head("run/x")


def says(streams: bytes, size: int, *, buffer: int) -> bytes:
    """What a compressed buffer says of its size, replaced."""
    at = -1
    for _ in range(buffer):
        at = streams.index(b"\x28\xb5\x2f\xfd", at + 1)
    return streams[: at - 8] + struct.pack("<q", size) + streams[at:]


BAD_OFFSETS = pa.Array.from_buffers(
    pa.binary(), 2, [None, pa.py_buffer(struct.pack("<3i", 0, 1 << 20, 4)), pa.py_buffer(b"{}{}")]
)
LARGE = columns(b" " * (8 << 20), b"{}")
MANY = pa.RecordBatch.from_arrays(
    [pa.repeat(b"{}", 1 << 20), pa.nulls(1 << 20, EVENTS.field(1).type)], schema=EVENTS
)


@pytest.mark.parametrize(
    "streams",
    [
        stream(LARGE),
        stream(MANY, compression="lz4"),
        says(stream(TWO), 1 << 40, buffer=1),
        says(stream(TWO), 1 << 62, buffer=2),
        says(stream(LARGE), 64, buffer=2),
        says(stream(TWO), -2, buffer=2),
    ],
    ids=["an event", "many", "huge offsets", "huge data", "more than it says", "less than nothing"],
)
def test_r16_events_that_inflate_beyond_what_they_may_are_an_error(
    streams: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MOST_INFLATED", 1 << 20)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(StagingError, match="run/x is torn or damaged"):
            list(staged_rows(pack([HEAD], [streams]), "run/x"))
        assert pool.max_memory() < 4 << 20
    finally:
        pa.set_memory_pool(before)


ONE_NULL = pa.RecordBatch.from_arrays([pa.array([b"1", None]), TWO.column(1)], schema=EVENTS)
OTHER = pa.RecordBatch.from_arrays([pa.array(["1", "2"])], ["data"])


@pytest.mark.parametrize(
    "content",
    [
        pack([{}], [stream(TWO)]),
        pack([1], [stream(TWO)]),
        pack([HEAD | {"partition": "x"}], [stream(TWO)]),
        pack([HEAD | {"partition": 1 << 40}], [stream(TWO)]),
        pack([HEAD | {"sequence": 1 << 63}], [stream(TWO)]),
        pack([HEAD | {"checkpoints": [[1]]}], [stream(TWO)]),
        pack([HEAD | {"checkpoints": [["x", 2]]}], [stream(TWO)]),
        pack([HEAD | {"checkpoints": [[1, "a"]]}], [stream(TWO)]),
        pack([HEAD | {"checkpoints": [[3, "a"], [-1, "b"]]}], [stream(TWO)]),
        pack([HEAD], [stream(columns(b"{}"))]),
        pack([HEAD], [stream(TWO, TWO)]),
        pack([HEAD], [stream(TWO), stream(TWO)]),
        pack([HEAD], [stream(TWO) + b"more"]),
        pack([HEAD]),
        pack([HEAD], [b"no stream at all"]),
        pack([HEAD], [stream(TWO)[:-20]]),
        pack([HEAD], [stream(ONE_NULL)]),
        pack([HEAD], [stream(OTHER, schema=OTHER.schema)]),
        pack([HEAD], [stream(TWO.slice(0, 0), TWO)]),
        pack(
            [HEAD],
            [
                stream(
                    pa.RecordBatch.from_arrays([BAD_OFFSETS, TWO.column(1)], schema=EVENTS),
                    compression=None,
                )
            ],
        ),
    ],
    ids=[
        *("no head", "a number", "a partition", "a large partition", "a large sequence"),
        *("no cursor", "other types", "another sum", "negative", "too few", "too many"),
        *("another stream", "more bytes", "no stream", "no Arrow", "cut", "null", "other columns"),
        *("an empty batch", "wrong offsets"),
    ],
)
def test_an_object_damaged_behind_a_valid_checksum_is_an_error(content: bytes) -> None:
    with pytest.raises(StagingError, match="staged object run/x is torn or damaged"):
        list(staged_rows(content, "run/x"))


@pytest.mark.parametrize("text", [b"[]", b'{"results":1}', b"no JSON", b"[" * 100_000])
def test_a_head_damaged_behind_a_valid_checksum_is_an_error(objects: Objects, text: bytes) -> None:
    objects.create("run/x", struct.pack("<4sII", b"FAS2", len(text), zlib.crc32(text)) + text)
    with pytest.raises(StagingError, match="run/x is torn or damaged"):
        objects.head("run/x")


# Plans


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"no zlib", zlib.compress(b"{}")[:-1], zlib.compress(b"{}") + b"more"),
        *map(zlib.compress, (b"", b"[]", b"{}", b'{"version":"x"}', b'{"version":1}')),
    ],
)
def test_a_damaged_plan_is_an_error(content: bytes) -> None:
    with pytest.raises(StagingError, match="run/plan is torn or damaged"):
        decode(content, "run/plan")


def test_r16_a_plan_that_inflates_beyond_what_it_may_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "MOST_INFLATED", 1 << 20)
    bomb = zlib.compress(b" " * (16 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(StagingError, match="run/plan is torn or damaged"):
            inflate(bomb, "run/plan")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# The fence


def test_r08_newer_run_wins_at_once_and_the_older_one_is_told_which(objects: Objects) -> None:
    first = Fence.claim(objects)
    first.check()
    second = Fence.claim(Objects(objects.location, "run"), first.number)
    other = Fence.claim(Objects(objects.location, "another run"))
    for fence in (second, other, second):
        fence.check()
    with pytest.raises(FencedError, match=r"a later run took the place .* process \d+ on ") as told:
        first.check()
    assert "\n" not in str(told.value)


def test_r08_each_of_several_that_start_at_once_has_a_place_of_its_own(objects: Objects) -> None:
    with ThreadPoolExecutor(16) as pool:
        fences = list(pool.map(lambda _: Fence.claim(objects), range(16)))
    assert sorted(fence.number for fence in fences) == list(range(1, 17))
    told = 0
    for fence in fences:
        try:
            fence.check()
        except FencedError:
            told += 1
    assert told == 15


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no JSON", "one: unknown"),
        (b'{"process":1,"host":"\\u001b[31m\\n","since":0}', r"'\\x1b[31m\\n', started 1970-01-01"),
        (b'{"process":1,"host":"a","since":1e300}', "one: unknown"),
    ],
)
def test_r21_what_a_later_run_says_of_itself_is_text(
    objects: Objects, content: bytes, text: str
) -> None:
    fence = Fence.claim(objects)
    objects.create(objects.driver_key(fence.number + 1), content)
    with pytest.raises(FencedError) as told:
        fence.check()
    assert text.replace(r"\\", "\\") in str(told.value)


def test_r08_store_that_overwrites_is_refused(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda *given, **_: put(*given))
    with pytest.raises(StagingError, match="conditional writes"):
        Fence.claim(objects)
