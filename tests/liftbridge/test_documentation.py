"""The blocks of the documentation's page on Liftbridge run, with addresses of the tests.

They run against the real broker. Nothing is there before: neither streams nor files, and of the
broker's settings only the one that the page asks for.
"""

from __future__ import annotations

import json
import os
import signal
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
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer, free_port
from tests import components, warm
from tests.docs.snippets import blocks, python_blocks
from tests.liftbridge.broker import require_liftbridge
from tests.liftbridge.helpers import SAFETY_NET, eventually

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
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
    relayed, operated, *_ = (block.text for block in blocks(PAGE) if block.language == "sh")
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


@pytest.mark.timeout(600)  # where nothing of the program was compiled before
async def test_a_broker_is_built_and_started_as_the_page_says(tmp_path: Path) -> None:
    go = components.require("go")
    *_, built, started = (block.text for block in blocks(PAGE) if block.language == "sh")
    assert built.startswith("module=github.com/liftbridge-io/")
    assert started.startswith("nats-server --addr")
    nats, api = free_port(), free_port()
    started = started.replace("4222", str(nats)).replace("9292", str(api))
    # Go may compare versions and fetch another Go, and keeps what it has where it always does.
    folders = ("GOCACHE", "GOMODCACHE")
    asked = await anyio.run_process([go, "env", "-json", *folders])
    environment = {**os.environ, **json.loads(asked.stdout), "HOME": str(tmp_path)}
    environment |= {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    programs = [str(Path(go).parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment["PATH"] = os.pathsep.join(programs)
    (tmp_path / "work").mkdir()
    script = f"({built})\ncd work\n{started}\nwait"
    with subprocess.Popen(  # noqa: ASYNC220
        ["bash", "-euc", script], cwd=tmp_path, env=environment, start_new_session=True
    ) as shell:
        try:
            async with LiftbridgeApi(f"127.0.0.1:{api}", timeout=SAFETY_NET) as client:
                await eventually((tmp_path / "work" / "liftbridge-data").exists, 500)
                await client.create_stream("orders")
                assert "orders" in (await client.cluster()).streams
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
