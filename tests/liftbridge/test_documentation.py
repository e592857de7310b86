"""The blocks of the documentation's page on Liftbridge run, with addresses of the tests.

They run against the real broker. Nothing is there before: neither streams nor files, and of the
broker's settings only the one that the page asks for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from feedapi_client.liftbridge import LiftbridgeApi
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests import warm
from tests.docs.snippets import blocks, python_blocks
from tests.liftbridge.clusters import require_liftbridge
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.usefixtures("no_calls_left"),
]

PAGE = "docs/pages/liftbridge.md"
SNIPPETS = python_blocks(PAGE)
SETTINGS = {"cursors.stream.partitions": 1}


@dataclass(frozen=True)
class Addresses:
    """Where a new broker is: its gRPC API, and NATS behind it."""

    api: str
    nats: str


@pytest.fixture
def new_broker() -> Iterator[Addresses]:
    require_liftbridge()
    with NatsServer() as nats, LiftbridgeServer(nats.url, settings=SETTINGS) as server:
        yield Addresses(server.address, nats.url)


@pytest.mark.parametrize("program", SNIPPETS, ids=range(1, len(SNIPPETS) + 1))
async def test_a_snippet_runs(
    program: str,
    feedapi_publisher: Publisher,
    new_broker: Addresses,
    tmp_path: Path,
) -> None:
    feedapi_publisher.extend(0, [{"entity": f"e{n % 5}", "n": n} for n in range(100)])
    for written, real in (
        ("https://service/myfeed", feedapi_publisher.url),
        ("nats://broker:4222", new_broker.nats),
        ("broker:9292", new_broker.api),
    ):
        program = program.replace(written, real or "")
    command = [sys.executable, "-W", "error", "-c", program]
    done = await anyio.to_thread.run_sync(
        lambda: warm.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    )
    assert done.returncode == 0, done.stdout.decode()
    assert done.stdout


async def test_the_commands_of_the_page_run_one_after_the_other(
    feedapi_publisher: Publisher,
    new_broker: Addresses,
    tmp_path: Path,
) -> None:
    feedapi_publisher.extend(0, [{"entity": f"e{n % 5}", "n": n} for n in range(100)])
    relayed, operated = (block.text for block in blocks(PAGE) if block.language == "sh")
    assert relayed.startswith("feedapi relay https://service/")
    assert operated.startswith("feedapi cursors ls --store liftbridge:")
    url = feedapi_publisher.url or ""
    places = {
        "https://service/myfeed": url,
        "nats://broker:4222": new_broker.nats,
        "broker:9292": new_broker.api,
        "https://old/feed": url,
    }
    ledger = (
        f"feedapi relay {url} --nats {new_broker.nats} --api {new_broker.api} --create "
        "--stream ledger --exactly-once events\n"
        "feedapi cursors export --store liftbridge://broker:9292/ledger >cursors.json\n"
    )
    text = f"{relayed}\n{ledger}\n{operated}"
    for written, real in places.items():
        text = text.replace(written, real)
    scripts = Path(sys.executable).parent
    done = await anyio.run_process(
        ["bash", "-euc", text],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        input=b"y\n",
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout.decode()
    async with LiftbridgeApi(new_broker.api, timeout=SAFETY_NET) as api:
        partitions = [await api.partition_metadata("orders", each) for each in range(4)]
    assert sum(partition.newest_offset + 1 for partition in partitions) == 100
    assert b"default @ https://new/feed: 1 position moved here" in done.stdout
    assert b"1 position imported" in done.stdout
