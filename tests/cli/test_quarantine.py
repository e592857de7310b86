"""``feedapi quarantine``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import orjson
import pytest

from feedapi_client import Batch, FeedConsumer, SQLiteCursorStore
from feedapi_client.testing import Publisher
from tests.cli.conftest import TIMEOUT, Spawn
from tests.cli.invoke import Invoked, Row, play

pytestmark = pytest.mark.usefixtures("feedapi")
Play = Callable[..., Invoked]

_HANDLERS = """
import contextlib, errno

seen = []

async def handle(batch):
    seen.extend(event.json()["n"] for event in batch.events)

async def each(event):
    seen.append(event.json()["n"])

@contextlib.asynccontextmanager
async def opened_each():
    yield each

async def refuse(batch):
    raise ValueError("database down", batch.events[0].json())

@contextlib.asynccontextmanager
async def opened():
    yield handle

@contextlib.asynccontextmanager
async def broken():
    raise ConnectionRefusedError(errno.ECONNREFUSED, "postgresql://user:hidden@db")
    yield

def not_async(batch):
    seen.append(batch)

def opens_not_async():
    return contextlib.nullcontext(not_async)
"""


@pytest.fixture
def rows(
    feedapi_publisher: Publisher, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Play:
    """Return a function that runs rows on a quarantine with events 1 and 3, ID1 and ID3."""
    (tmp_path / "replayed.py").write_text(_HANDLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "replayed", raising=False)
    feedapi_publisher.extend(0, [{"n": n, "secret": "payload"} for n in range(4)])

    async def handle(batch: Batch) -> None:
        for event in batch.events:
            if event.json()["n"] % 2:
                raise ValueError("a secret in the error")

    async def consume() -> None:
        assert feedapi_publisher.url is not None
        async with (
            SQLiteCursorStore(store) as cursors,
            FeedConsumer(feedapi_publisher.url, store=cursors, follow=False) as consumer,
        ):
            await consumer.run(handle, on_failure="quarantine")

    anyio.run(consume)
    places = {"URL": feedapi_publisher.url, "STORE": store, "OTHER": tmp_path / "other.db"}
    listed = orjson.loads(play([Row("quarantine ls --store STORE --json")], **places).stdout)
    places |= {"ID1": listed[0]["id"], "ID3": listed[1]["id"]}
    places["DATABASE"] = f"sqlite+aiosqlite:///{store}"
    places["OTHERDB"] = f"sqlite+aiosqlite:///{tmp_path / 'other.db'}"
    return lambda *rows: play(rows, **places)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file of Linux")
def test_a_full_disk_ends_no_replay(rows: Play, spawn: Spawn, store: Path) -> None:
    words = ("quarantine", "replay", "--all", "--store", store, "--handler", "replayed:handle")
    with Path("/dev/full").open("wb") as full:
        process = spawn(*words, stdout=full, env={"PYTHONUNBUFFERED": "1"})
        assert process.wait(TIMEOUT) == 0
    rows(Row("quarantine ls --store STORE", says=EMPTY))


EMPTY = "=the quarantine is empty\n"
REPLAY, DROP = "quarantine replay --store STORE --handler", "quarantine drop --store STORE"
CASES = {
    "ls": [
        Row("quarantine ls --store STORE", says="\tdefault @ URL\t0\tValueError\t"),
        Row("quarantine ls --store STORE -p 1", says=EMPTY),
        Row("quarantine ls --store STORE --name other", says=EMPTY),
        Row("quarantine ls --store STORE -p 1 --json", says="=[]\n"),
    ],
    "where nothing was quarantined": [
        *[Row("quarantine ls --store OTHER", 1, "there is no such file")] * 2,
        Row("cursors set 0 c URL --store OTHER"),
        Row("quarantine ls --store OTHER", says=EMPTY),
        Row("quarantine ls --store OTHERDB", says=EMPTY),
        Row("quarantine show x --store OTHERDB", 1, "there is no event 'x'"),
        Row("quarantine ls --store postgresql://me:secret@127.0.0.1:1/db", 1, "can't be reached"),
        Row("quarantine ls --store redis://me:secret@localhost/0", 1, "holds no quarantine"),
    ],
    "show": [
        Row("quarantine show ID1 --store STORE", says='"error": "a secret in the error"'),
        Row("quarantine show ID1 --store STORE", says='"data": {"n":1,"secret":"payload"}'),
        Row("quarantine show nothing --store STORE", 1, "there is no event 'nothing'"),
    ],
    "drop": [
        Row(DROP, 2, "give IDs, or --all"),
        Row(f"{DROP} x y --all", 2, "at most one feed"),
        Row(f"{DROP} --all", 1, "Delete 2 events for good?", "n\n"),
        Row(f"{DROP} http://elsewhere --all --yes", says="=0 events deleted\n"),
        Row(f"{DROP} --all --name nobody --yes", says="=0 events deleted\n"),
        Row(f"{DROP} ID1 --name nobody --yes", says="=0 events deleted\n"),
        Row(f"{DROP} ID1 --yes", says="=1 event deleted\n"),
        Row(f"{DROP} URL --all --yes --json", says='={\n  "deleted": 1\n}\n'),
        Row("quarantine ls --store STORE", says=EMPTY),
    ],
    "a database given by URL": [
        Row("quarantine drop --all --yes --store DATABASE", says="=2 events deleted\n")
    ],
    "replay": [
        *(
            Row(f"{REPLAY} {handler} --all", code, said)
            for handler, code, said in (
                ("nothing_of_the_kind:handle", 2, "can't be imported"),
                ("os:nothing", 2, "can't be imported"),
                ("os:sep", 2, "is no function"),
                ("replayed:not_async", 2, "must be a function with async"),
                ("replayed:opens_not_async", 2, "must be a function with async"),
                ("replayed:broken", 1, "ConnectionRefusedError: the connection was refused"),
            )
        ),
        Row(
            f"{REPLAY} replayed:opened ID3",
            says="=ID3  handled\n1 event handled, 0 failed again and kept\n",
        ),
        Row(f"{REPLAY} replayed:handle --all", says="1 event handled, 0 failed again and kept\n"),
        Row("quarantine ls --store STORE", says=EMPTY),
    ],
    "replay by key": [
        Row(f"{REPLAY} replayed:each --key n --all", 2, "--key takes a JSON pointer"),
        Row(f"{REPLAY} replayed:not_async --key /n --all", 2, "async def handle(event)"),
        Row(f"{REPLAY} replayed:opened_each --key /n ID3", says="ID3  handled\n1 event handled"),
        Row(f"{REPLAY} replayed:each --key /n --all", says="1 event handled"),
        Row("quarantine ls --store STORE", says=EMPTY),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_r19_quarantine(rows: Play, case: str) -> None:
    for row in CASES[case]:
        output = rows(row).output
        assert case == "show" or "secret" not in output
        assert "hidden" not in output
    if case.startswith("replay"):
        assert sys.modules["replayed"].seen == [3, 1]


def test_r19_events_that_fail_again_stay(rows: Play) -> None:
    said = "ID1  failed again: ValueError\n0 events handled, 1 failed again and kept\n"
    failed = rows(Row(f"{REPLAY} replayed:refuse ID1", 1, said, input=""))
    assert "payload" not in failed.output
    printed = rows(Row(f"{REPLAY} replayed:refuse ID1 --json", 1, input="")).stdout
    id = orjson.loads(rows(Row("quarantine show ID1 --store STORE")).stdout)["id"]
    events = [{"id": id, "error": "ValueError"}]
    assert orjson.loads(printed) == {"handled": 0, "failed": 1, "events": events}
    handled = orjson.loads(rows(Row(f"{REPLAY} replayed:handle ID1 --json")).stdout)
    assert handled == {"handled": 1, "failed": 0, "events": [{"id": id, "error": None}]}
    asked = rows(Row(f"{DROP} ID3 --json", 1, "Delete 1 event for good?", "n\n"))
    assert "Delete" in asked.stderr
