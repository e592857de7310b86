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
    open_store,
    pack,
)

RESULT: dict[str, Any] = {"partition": 0, "start": "_first", "cursor": "a", "events": 2}
HEAD = RESULT | {"depth": 0, "sequence": 0, "checkpoints": [[2, "a"]]}
DAMAGED = "staged object run/x is torn or damaged"


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(tmp_path.as_uri(), "run")


def event(payload: bytes, headers: dict[str, Any] | None = None) -> Event:
    return Event(_payload=msgspec.Raw(payload), _headers=headers)


def stream(*batches: pa.RecordBatch, compression: str | None = "zstd") -> Any:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def columns(*payloads: bytes) -> pa.RecordBatch:
    return event_columns([event(payload) for payload in payloads], headers=False)


TWO = columns(b'{"n":1}', b'{"n":2}')


def of_data(data: pa.Array) -> pa.RecordBatch:
    headers = pa.nulls(len(data), EVENTS.field(1).type)
    return pa.RecordBatch.from_arrays([data, headers], schema=EVENTS)


# ---------------------------------------------------------------------- the location


def test_a_location_can_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Objects("a folder", "run").create("run/x", b"here")
    assert pickle.loads(pickle.dumps(Objects("a folder", "run"))).get("run/x") == b"here"
    assert (tmp_path / "a folder/run/x").exists()


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
        assert (caught.value.__cause__, caught.value.__suppress_context__) == (None, True)
    # Two million letters: looked at once each, or a million times.
    error = OSError(f"refused https://user:s3cret@host/x {'a' * 2_000_000}")
    assert staging.reason(error, "").startswith("OSError: refused https://… aaa")


@pytest.mark.parametrize("place", ["dbfs:/x", "hdfs://name/x", "memory:///x", "ftp://host/x"])
def test_error_of_a_location_that_cannot_be_used_names_the_reason(place: str) -> None:
    scheme = place.partition(":")[0]
    with pytest.raises(StagingError, match=f"staging locations can't be {scheme}: URLs: give an"):
        open_store(place)
    with pytest.raises(StagingError, match=r"can't be opened: .*Error: "):
        open_store("file://host/staging")


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


# ---------------------------------------------------------------------- events


@pytest.mark.parametrize("size", [0, 70_000, 300_000])
def test_head_of_any_length_is_read_on_its_own(objects: Objects, size: int) -> None:
    for read in (objects.get, objects.head):
        with pytest.raises(MissingObjectError, match="run/x is not there"):
            read("run/x")
    objects.create("run/x", pack([RESULT | {"cursor": "x" * size}], [b"body" * 1000]))
    assert objects.head("run/x") == [FetchResult(0, "_first", "x" * size, 2)]


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
    texts = [b"[]", b'{"results":1}', b"no JSON", b"[" * 100_000]  # behind a valid checksum
    heads = [struct.pack("<4sII", b"FAS2", len(text), zlib.crc32(text)) + text for text in texts]
    for number, content in enumerate([sound[:40], *heads]):
        objects.create(f"run/{number}", content)
        with pytest.raises(StagingError, match=f"staged object run/{number}"):
            objects.head(f"run/{number}")


def says(streams: bytes, size: int, *, buffer: int) -> bytes:
    """What a compressed buffer says of its size, replaced."""
    at = -1
    for _ in range(buffer):
        at = streams.index(b"\x28\xb5\x2f\xfd", at + 1)
    return streams[: at - 8] + struct.pack("<q", size) + streams[at:]


LARGE = columns(b" " * (8 << 20), b"{}")
MANY = of_data(pa.repeat(b"{}", 1 << 20))


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
        with pytest.raises(StagingError, match=DAMAGED):
            list(staged_rows(pack([HEAD], [streams]), "run/x"))
        assert pool.max_memory() < 4 << 20
    finally:
        pa.set_memory_pool(before)


BAD_OFFSETS = [None, pa.py_buffer(struct.pack("<3i", 0, 1 << 20, 4)), pa.py_buffer(b"{}{}")]
WRONG_HEADS: dict[str, Any] = {
    "no head": {},
    "a number": 1,
    "a partition": HEAD | {"partition": "x"},
    "a large partition": HEAD | {"partition": 1 << 40},
    "a large sequence": HEAD | {"sequence": 1 << 63},
    "no cursor": HEAD | {"checkpoints": [[1]]},
    "other types": HEAD | {"checkpoints": [["x", 2]]},
    "another sum": HEAD | {"checkpoints": [[1, "a"]]},
    "negative": HEAD | {"checkpoints": [[3, "a"], [-1, "b"]]},
}
WRONG_STREAMS: dict[str, list[bytes]] = {
    "too few": [stream(columns(b"{}"))],
    "too many": [stream(TWO, TWO)],
    "another stream": [stream(TWO), stream(TWO)],
    "more bytes": [stream(TWO) + b"more"],
    "no stream": [],
    "no Arrow": [b"no stream at all"],
    "cut": [stream(TWO)[:-20]],
    "null": [stream(of_data(pa.array([b"1", None])))],
    "other columns": [stream(pa.RecordBatch.from_arrays([pa.array(["1", "2"])], ["data"]))],
    "an empty batch": [stream(TWO.slice(0, 0), TWO)],
    "wrong offsets": [
        stream(of_data(pa.Array.from_buffers(pa.binary(), 2, BAD_OFFSETS)), compression=None)
    ],
}


@pytest.mark.parametrize("wrong", [*WRONG_HEADS, *WRONG_STREAMS])
def test_an_object_damaged_behind_a_valid_checksum_is_an_error(wrong: str) -> None:
    content = pack([WRONG_HEADS.get(wrong, HEAD)], WRONG_STREAMS.get(wrong, [stream(TWO)]))
    with pytest.raises(StagingError, match=DAMAGED):
        list(staged_rows(content, "run/x"))


# ---------------------------------------------------------------------- plans and the fence


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"no zlib", zlib.compress(b"{}")[:-1], zlib.compress(b"{}") + b"more"),
        *map(zlib.compress, (b"", b"[]", b"{}", b'{"version":"x"}', b'{"version":1}')),
        zlib.compress(b" " * (16 << 20)),  # inflates beyond what it may (R16)
    ],
)
def test_a_damaged_plan_is_an_error(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MOST_INFLATED", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(StagingError, match="run/plan is torn or damaged"):
            decode(content, "run/plan")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_r08_each_of_several_runs_has_a_place_and_all_but_the_newest_are_told(
    objects: Objects,
) -> None:
    Fence.claim(Objects(objects.location, "another run"))
    with ThreadPoolExecutor(16) as pool:
        fences = sorted(pool.map(lambda _: Fence.claim(objects), range(16)), key=lambda f: f.number)
    assert [fence.number for fence in fences] == list(range(1, 17))
    fences[-1].check()
    for fence in fences[:-1]:
        with pytest.raises(
            FencedError, match=r"a later run took the place .* process \d+ on [^\n]+$"
        ):
            fence.check()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no JSON", "one: unknown"),
        (b'{"process":1,"host":"\\u001b[31m\\n","since":0}', r"'\x1b[31m\n', started 1970-01-01"),
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
    assert text in str(told.value)


def test_r08_store_that_overwrites_is_refused(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda *given, **_: put(*given))
    with pytest.raises(StagingError, match="conditional writes"):
        Fence.claim(objects)
