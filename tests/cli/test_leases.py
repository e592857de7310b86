"""``feedapi leases``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest

from feedapi_client import FeedKey, Position, SQLiteCursorStore
from feedapi_client.stores import Lease
from tests.cli.conftest import Feedapi
from tests.leases import claims

KEY = FeedKey("http://service.test/feed", "app")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A store of two instances, one of them dead, and a partition that nobody reads."""
    path = tmp_path / "shared.db"

    async def save() -> None:
        async with SQLiteCursorStore(path) as store:
            await store.save(KEY, {0: Position("a")})
            one = "one\x1b[31m"
            await store.beat(KEY, one, 1000)
            await store.beat(KEY, "two", 0.001)
            await store.put(KEY, one, claims(one, dict.fromkeys((-1, 0, 1, 3), 0)))
            await store.put(KEY, one, [Lease(3, None, 1)])
            while (await store.look(KEY)).instances[1].alive:  # noqa: ASYNC110
                await anyio.sleep(0.001)

    anyio.run(save)
    return path


def _rows(output: str) -> list[list[str]]:
    return [line.split("\t") for line in output.splitlines()[2:]]


def test_ls_shows_instances_with_age_and_load(feedapi: Feedapi, shared: Path) -> None:
    result = feedapi("leases", "ls", "--store", shared)
    assert result.exit_code == 0, result.output
    assert "app @ http://service.test/feed" in result.stdout
    assert "\x1b" not in result.stdout
    one, two, *_ = _rows(result.stdout)
    assert one[1] == "alive"
    assert one[3] == "2"
    assert re.fullmatch(r"0 \(\d+ s\), 1 \(\d+ s\)", one[4])
    assert two[0] == "two"
    assert two[1].startswith("dead for")
    assert two[3] == "0"
    assert "nobody" in result.stdout


def test_ls_json(feedapi: Feedapi, shared: Path) -> None:
    result = feedapi("leases", "ls", "--store", shared, "--name", "app", "--json")
    (feed,) = orjson.loads(result.stdout)["feeds"]
    found: list[dict[str, Any]] = feed["leases"]
    assert [(lease["partition"], lease["instance"] is None) for lease in found] == [
        (0, False),
        (1, False),
        (3, True),
    ]
    assert [one["alive"] for one in feed["instances"]] == [True, False]


def test_ls_of_a_store_that_nobody_shares(feedapi: Feedapi, tmp_path: Path) -> None:
    async def save() -> None:
        async with SQLiteCursorStore(tmp_path / "plain.db") as store:
            await store.save(KEY, {0: Position("a")})

    anyio.run(save)
    result = feedapi("leases", "ls", "--store", tmp_path / "plain.db")
    assert "no instances share a feed" in result.stdout
    assert feedapi("leases", "ls", "--store", tmp_path / "plain.db", "--name", "x").exit_code == 1
