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


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("command", COMMANDS)
def test_what_changes_positions_refuses_beside_a_living_instance(
    feedapi: Feedapi, publisher: Publisher, shared: Path, tmp_path: Path, command: str
) -> None:
    export = tmp_path / "export.json"
    export.write_bytes(feedapi("cursors", "export", "--store", shared).stdout_bytes)
    now = datetime.now(UTC).isoformat()
    words = {"STORE": shared, "URL": publisher.url, "EXPORT": export, "NOW": now}
    arguments = ["cursors", *(words.get(str(each), each) for each in COMMANDS[command])]
    before = anyio.run(_load, shared, publisher)
    refused = feedapi(*arguments)
    assert refused.exit_code == 1, refused.output
    assert "1 instances that share this feed are alive (alive): stop them" in refused.stderr
    assert "--force" in refused.stderr
    assert anyio.run(_load, shared, publisher) == before
    forced = feedapi(*arguments, "--force")
    assert forced.exit_code == 0, forced.output
    assert anyio.run(_load, shared, publisher) != before


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_dry_run_says_what_would_be_done_and_changes_nothing(
    feedapi: Feedapi, publisher: Publisher, shared: Path, tmp_path: Path, command: str
) -> None:
    anyio.run(_leave, shared, publisher)
    export = tmp_path / "export.json"
    export.write_bytes(feedapi("cursors", "export", "--store", shared).stdout_bytes)
    now = datetime.now(UTC).isoformat()
    words = {"STORE": shared, "URL": publisher.url, "EXPORT": export, "NOW": now}
    arguments = ["cursors", *(words.get(str(each), each) for each in COMMANDS[command])]
    before = anyio.run(_load, shared, publisher)
    dry = feedapi(*arguments, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "(dry run: nothing is changed)\n" in dry.stdout
    planned = orjson.loads(feedapi(*arguments, "--dry-run", "--json").stdout)["feeds"]
    assert anyio.run(_load, shared, publisher) == before
    done = orjson.loads(feedapi(*arguments, "--json").stdout)["feeds"]
    assert list(map(_ids, done)) == list(map(_ids, planned))
    assert all(map(_ids, done))
    assert anyio.run(_load, shared, publisher) != before


def _ids(feed: dict[str, Any]) -> list[int]:
    return [row["partition"] for row in feed["positions"]]


@pytest.mark.parametrize("command", ["reset", "import", "rewind"])
def test_a_change_of_one_partition_leaves_the_others(
    feedapi: Feedapi, publisher: Publisher, shared: Path, tmp_path: Path, command: str
) -> None:
    export = tmp_path / "export.json"
    export.write_bytes(feedapi("cursors", "export", "--store", shared).stdout_bytes)
    now = datetime.now(UTC).isoformat()
    for partition in (0, 1, 7):
        assert (
            feedapi("cursors", "set", partition, "c5", "--store", shared, "--force").exit_code == 0
        )
    words = {"STORE": shared, "EXPORT": export, "NOW": now}
    arguments = ["cursors", *(words.get(str(each), each) for each in COMMANDS[command])]
    done = feedapi(*arguments, "-p", 0, "-p", 7, "--force")
    assert done.exit_code == 0, done.output
    after = {id: at.cursor for id, at in anyio.run(_load, shared, publisher).items()}
    others = {1: "c5"} | ({7: "c5"} if command == "import" else {})
    assert after == others | ({} if command == "reset" else {0: "_first"})
    listed = feedapi("cursors", "ls", "--store", shared, "-p", 1, "--json").stdout
    assert list(map(_ids, orjson.loads(listed)["feeds"])) == [[1]]


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
