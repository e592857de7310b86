"""What type checkers make of the public names, in their strict modes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
from typing import Any, assert_type

import msgspec

from feedapi_client import Batch, Event, FeedConsumer, SyncBatch, SyncFeedConsumer


class Placed(msgspec.Struct, tag=True):
    n: int


class Shipped(msgspec.Struct, tag=True):
    m: int


async def typed(consumer: FeedConsumer[Placed]) -> None:
    async for event in consumer:
        assert_type(event, Event[Placed])
        assert_type(event.json(), Placed)
    async for batch in consumer.batches():
        assert_type([event.json().n for event in batch], list[int])


async def handle(batch: Batch[Placed]) -> None:
    for event in batch:
        assert_type(event.json(), Placed)
        assert_type(event.decode(Shipped), Shipped)
        either: Placed | Shipped = event.decode(Placed | Shipped)
        print(either)


async def main() -> None:
    decoder = msgspec.json.Decoder(Placed)
    async with FeedConsumer("https://service/myfeed", decoder=decoder.decode) as consumer:
        await typed(consumer)
        await consumer.run(handle)


def handle_in_thread(batch: SyncBatch[Placed]) -> None:
    for event in batch:
        assert_type(event.json(), Placed)


def without_async() -> None:
    decoder = msgspec.json.Decoder(Placed)
    with SyncFeedConsumer("https://service/myfeed", decoder=decoder.decode) as consumer:
        assert_type(consumer, SyncFeedConsumer[Placed])
        for event in consumer:
            assert_type(event, Event[Placed])
        for batch in consumer.batches():
            assert_type(batch, SyncBatch[Placed])
        consumer.run(handle_in_thread, threads=4)


def untyped_without_async(batch: SyncBatch) -> None:
    for event in batch:
        assert_type(event.json(), Any)


async def untyped(batch: Batch) -> None:
    for event in batch:
        assert_type(event.json(), Any)


async def plain() -> None:
    async with FeedConsumer("https://service/myfeed") as consumer:
        await consumer.run(untyped)
"""
WRONG = PROGRAM.replace("[event.json().n for", "[event.json().m for")
MISSPELLED = """
from feedapi_client import FeedConsmer
from feedapi_client.quarantine import MemoryQuarantneStore
from feedapi_client.stores import PostgresCursrStore
from feedapi_client.testing import Publishr
from feedapi_client.testing.simulator import simulat

print(FeedConsmer, MemoryQuarantneStore, PostgresCursrStore, Publishr, simulat)
"""
"""What a program gets wrong on each of these lines is said."""


def mypy(folder: Path, text: str) -> str:
    (folder / "program.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "program.py"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    ).stdout


def pyright(folder: Path, text: str) -> str:
    (folder / "program.py").write_text(text, encoding="utf-8")
    settings = {"typeCheckingMode": "strict", "include": ["program.py"]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    ).stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("check", "passes"), [(mypy, "Success"), (pyright, "0 errors")])
def test_payloads_have_the_type_of_the_decoder(check: object, passes: str, tmp_path: Path) -> None:
    assert callable(check)
    output = check(tmp_path, PROGRAM)
    assert passes in output, output
    assert passes not in check(tmp_path, WRONG)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", [mypy, pyright])
def test_a_name_that_is_none_is_told(check: object, tmp_path: Path) -> None:
    assert callable(check)
    output = check(tmp_path, MISSPELLED)
    for name in re.findall(r"import (\w+)", MISSPELLED):
        assert f'"{name}"' in output, output
