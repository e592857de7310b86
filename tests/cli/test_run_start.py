"""SIGTERM at any step of the start of ``feedapi run``: a clean end, without leases left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from feedapi_client import FeedKey, SQLiteCursorStore
from feedapi_client.testing import Publisher, faults

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
    pytest.mark.timeout(240),
]

_PROGRAM = """
import os, signal, sys
left = int(sys.argv.pop(1))
def step(frame, event, argument):
    global left
    left -= 1
    if not left:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
signal.setitimer(signal.ITIMER_REAL, 8)
from feedapi_client.cli import main
sys.argv[0] = "feedapi"
sys.setprofile(step)
main()
"""
"""Sends the signal to itself after so many calls and returns of functions.

Where the start has fewer, it waits for the feed by then, and the signal comes after some seconds.
"""
_HANDLER = "async def handle(batch):\n    pass\n"
_STEPS = [20, 300_000, 1_000_000]
_MORE_STEPS = [5_000, 100_000, 500_000, 700_000, 10_000_000]


@pytest.mark.parametrize(
    "steps", [*_STEPS, *(pytest.param(steps, marks=pytest.mark.slow) for steps in _MORE_STEPS)]
)
def test_r20_sigterm_at_any_step_of_the_start_is_a_clean_end(
    feedapi_publisher_factory: Callable[..., Publisher], tmp_path: Path, steps: int
) -> None:
    publisher = feedapi_publisher_factory(3)
    publisher.extend(0, [{"n": 1}])
    # So that the start is not over before the signal comes.
    publisher.fail(faults.Delay(100.0), times=None)
    (tmp_path / "app.py").write_text(_HANDLER)
    store = tmp_path / "cursors.db"
    assert publisher.url is not None
    arguments = ["run", publisher.url, "--handler", "app:handle", "--store", store, "--share"]
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(steps), *map(str, arguments)],
        cwd=tmp_path,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert b"Traceback" not in result.stderr
    if store.exists():
        assert anyio.run(_members, store, publisher.url) == []


async def _members(path: Path, url: str) -> list[object]:
    """Return the instances, and the leases that have an owner."""
    key = FeedKey(url)
    async with SQLiteCursorStore(path) as store:
        instances, leases = await store.look(key)
        return [*instances, *(lease for lease in leases.values() if lease.owner)]
