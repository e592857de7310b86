"""The Python blocks of the documentation's page on Liftbridge run, with addresses of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeBroker, NatsServer
from tests.docs.snippets import python_blocks

pytestmark = pytest.mark.anyio

SNIPPETS = python_blocks("docs/pages/liftbridge.md")


@pytest.mark.parametrize("program", SNIPPETS, ids=range(1, len(SNIPPETS) + 1))
async def test_a_snippet_runs(
    program: str,
    feedapi_publisher: Publisher,
    nats_server: NatsServer,
    api_broker: LiftbridgeBroker,
    tmp_path: Path,
) -> None:
    await api_broker.create_stream("orders", partitions=4)
    feedapi_publisher.extend(0, [{"entity": f"e{n % 5}", "n": n} for n in range(100)])
    for written, real in (
        ("https://service/myfeed", feedapi_publisher.url),
        ("nats://broker:4222", nats_server.url),
        ("broker:9292", api_broker.address),
    ):
        program = program.replace(written, real or "")
    done = await anyio.run_process(
        [sys.executable, "-W", "error", "-c", program],
        check=False,
        cwd=tmp_path,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout.decode()
    assert done.stdout
