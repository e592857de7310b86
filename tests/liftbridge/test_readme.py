"""The snippets of the README's Liftbridge chapter run, with other addresses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeBroker, NatsServer

pytestmark = pytest.mark.anyio

README = Path(__file__).parents[2] / "README.md"


def snippets() -> list[str]:
    chapter = README.read_text().partition("\n## Liftbridge\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", chapter, re.DOTALL)


@pytest.mark.parametrize("number", range(len(snippets())))
async def test_a_snippet_runs(
    number: int,
    feedapi_publisher: Publisher,
    nats_server: NatsServer,
    api_broker: LiftbridgeBroker,
    tmp_path: Path,
) -> None:
    await api_broker.create_stream("orders", partitions=4)
    feedapi_publisher.extend(0, [{"entity": f"e{n % 5}", "n": n} for n in range(100)])
    program = snippets()[number]
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
