"""``feedapi cursors`` beside instances that share the feed: what changes positions is refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest

from feedapi_client import FeedKey, Position, SQLiteCursorStore
from feedapi_client.stores import Journal
from feedapi_client.testing import Publisher
from tests.cli.conftest import Feedapi

Words = Callable[[str], list[object]]


@pytest.fixture
def publisher(feedapi_publisher_factory: Callable[..., Publisher]) -> Publisher:
    publisher = feedapi_publisher_factory(2, page_size=10, checkpoint_every=5)
    publisher.extend(0, [{"n": n} for n in range(7)])
    publisher.split(1, into=(2, 3), method="starts-after")
    return publisher


@pytest.fixture
def shared(publisher: Publisher, tmp_path: Path) -> Path:
    """The store of an instance that is alive and one that is dead."""
    path, key = tmp_path / "shared.db", FeedKey(str(publisher.url))

    async def fill() -> None:
        async with SQLiteCursorStore(path, journal=Journal()) as store:
            await store.save(key, {0: Position("_first"), 1: Position("_first")})
            await store.beat(key, "dead", 0.001)
            await store.beat(key, "alive", 1000)

    anyio.run(fill)
    return path


async def _load(path: Path, publisher: Publisher) -> dict[int, Position]:
    async with SQLiteCursorStore(path) as store:
        return await store.load(FeedKey(str(publisher.url)))


async def _leave(path: Path, publisher: Publisher) -> None:
    async with SQLiteCursorStore(path) as store:
        await store.leave(FeedKey(str(publisher.url)), "alive")


COMMANDS = {
    "set": ("set", 0, "c5", "--store", "STORE"),
    "reset": ("reset", "--store", "STORE", "--yes"),
    "import": ("import", "EXPORT", "--store", "STORE", "--yes"),
    "rewind": ("rewind", "--to", "NOW", "--store", "STORE", "--yes"),
    "skip": ("skip", "URL", "--store", "STORE", "--quiet"),
    "drain": ("drain", "URL", 1, "--store", "STORE", "--yes"),
    "rename": ("rename", "default", "new", "--store", "STORE"),
    "move": ("move", "URL", "http://elsewhere.test/feed", "--store", "STORE"),
}


@pytest.fixture
def words(feedapi: Feedapi, publisher: Publisher, shared: Path, tmp_path: Path) -> Words:
    """Return a function that gives the command line of a command, with the present positions."""
    export = tmp_path / "export.json"
    export.write_bytes(feedapi("cursors", "export", "--store", shared).stdout_bytes)
    now = datetime.now(UTC).isoformat()
    known = {"STORE": shared, "URL": publisher.url, "EXPORT": export, "NOW": now}
    return lambda command: [
        "cursors",
        *(known.get(str(each), each) for each in COMMANDS[command]),
    ]


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("command", COMMANDS)
def test_what_changes_positions_refuses_beside_a_living_instance(
    feedapi: Feedapi, publisher: Publisher, shared: Path, words: Words, command: str
) -> None:
    before = anyio.run(_load, shared, publisher)
    refused = feedapi(*words(command))
    assert refused.exit_code == 1, refused.output
    assert "1 instances that share this feed are alive (alive): stop them" in refused.stderr
    assert "--force" in refused.stderr
    assert anyio.run(_load, shared, publisher) == before
    forced = feedapi(*words(command), "--force")
    assert forced.exit_code == 0, forced.output
    assert anyio.run(_load, shared, publisher) != before


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_dry_run_says_what_would_be_done_and_changes_nothing(
    feedapi: Feedapi, publisher: Publisher, shared: Path, words: Words, command: str
) -> None:
    anyio.run(_leave, shared, publisher)
    before = anyio.run(_load, shared, publisher)
    dry = feedapi(*words(command), "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "(dry run: nothing is changed)\n" in dry.stdout
    planned = orjson.loads(feedapi(*words(command), "--dry-run", "--json").stdout)["feeds"]
    assert anyio.run(_load, shared, publisher) == before
    done = orjson.loads(feedapi(*words(command), "--json").stdout)["feeds"]
    assert list(map(_ids, done)) == list(map(_ids, planned))
    assert all(map(_ids, done))
    assert anyio.run(_load, shared, publisher) != before


def _ids(feed: dict[str, Any]) -> list[int]:
    return [row["partition"] for row in feed["positions"]]


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("reset", {1: "c5"}),
        ("import", {0: "_first", 1: "c5", 7: "c5"}),
        ("rewind", {0: "_first", 1: "c5"}),
        ("move", {1: "c5"}),
        ("rename", {1: "c5"}),
    ],
)
def test_a_change_of_some_partitions_leaves_the_others(
    feedapi: Feedapi,
    publisher: Publisher,
    shared: Path,
    words: Words,
    command: str,
    left: dict[int, str],
) -> None:
    arguments = (*words(command), "-p", 0, "-p", 7, "--force")
    for partition in (0, 1, 7):
        assert not feedapi(
            "cursors", "set", partition, "c5", "--store", shared, "--force"
        ).exit_code
    planned = orjson.loads(feedapi(*arguments, "--dry-run", "--json").stdout)["feeds"]
    done = orjson.loads(feedapi(*arguments, "--json").stdout)["feeds"]
    assert list(map(_ids, done)) == list(map(_ids, planned))
    after = {id: at.cursor for id, at in anyio.run(_load, shared, publisher).items()}
    assert after == left
    listed = orjson.loads(feedapi("cursors", "ls", "--store", shared, "-p", 1, "--json").stdout)
    assert [ids for ids in map(_ids, listed["feeds"]) if ids] == [[1]]
    if command in ("move", "rename"):
        assert done[0]["positions"][0]["cursor"] == "c5"
        assert _exported(feedapi, shared)[done[0]["url"], done[0]["name"]] == [0, 7]
        again = feedapi(*words(command), "-p", 7, "--force")
        assert (again.exit_code, "nothing is stored" in again.stderr) == (1, True)
        anyio.run(_save, shared, publisher, 7)
        again = feedapi(*words(command), "-p", 7, "--force")
        assert (again.exit_code, "there are cursors already" in again.stderr) == (1, True)
        assert feedapi(*words(command), "-p", 1, "--force").exit_code == 0
        assert _exported(feedapi, shared)[done[0]["url"], done[0]["name"]] == [0, 1, 7]


async def _save(path: Path, publisher: Publisher, partition: int) -> None:
    async with SQLiteCursorStore(path) as store:
        await store.replace(FeedKey(str(publisher.url)), {partition: Position("c9")})


def _exported(feedapi: Feedapi, store: Path) -> dict[tuple[str, str], list[int]]:
    feeds = orjson.loads(feedapi("cursors", "export", "--store", store).stdout)["feeds"]
    return {(each["url"], each["name"]): _ids(each) for each in feeds}


def test_a_restoration_is_refused_too(feedapi: Feedapi, publisher: Publisher, shared: Path) -> None:
    arguments = ("cursors", "restore", publisher.url, 0, "--store", shared, "--yes")
    refused = feedapi(*arguments)
    assert refused.exit_code == 1
    assert "instances that share this feed are alive" in refused.stderr
    forced = feedapi(*arguments, "--force")
    assert "are alive" not in forced.stderr  # but there is nothing to restore


def test_once_the_instances_have_left_nothing_is_refused(
    feedapi: Feedapi, publisher: Publisher, shared: Path
) -> None:
    anyio.run(_leave, shared, publisher)
    assert feedapi("cursors", "set", 0, "c5", "--store", shared).exit_code == 0


def test_what_only_reads_is_never_refused(
    feedapi: Feedapi, publisher: Publisher, shared: Path
) -> None:
    now = datetime.now(UTC).isoformat()
    for arguments in (("ls",), ("export",), ("rewind", "--to", now, "--dry-run")):
        result = feedapi("cursors", *arguments, "--store", shared)
        assert result.exit_code == 0, result.output
