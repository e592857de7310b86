"""The lease of a query: one run at a time, and the late one is told so (rule 8)."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from feedapi_client.errors import FencedError
from feedapi_client.spark.staging import lease as leases
from feedapi_client.spark.staging.lease import QueryLease
from feedapi_client.spark.staging.staging_errors import StagingError

QUICK = (0.05, 1.0)
"""Seconds between two beats, and until a lease without one is taken over."""

Make = Callable[..., QueryLease]


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Make]:
    made: list[QueryLease] = []

    def make(query: str = "checkpoint", quick: tuple[float, float] = QUICK) -> QueryLease:
        made.append(QueryLease(tmp_path.as_uri(), query, *quick))
        return made[-1]

    yield make
    for one in made:
        one.release()


def stored(tmp_path: Path) -> list[Path]:
    return sorted(path for path in tmp_path.glob("leases/*/*") if path.is_file())


def pause(one: QueryLease) -> None:
    """Stop the beat of a lease, as a process does that is paused."""
    one._end.set()


def test_overlapping_run_is_refused_in_one_line(lease: Make) -> None:
    first = lease()
    first.acquire()
    with pytest.raises(FencedError, match=f"another run .* process {os.getpid()} on") as caught:
        lease().acquire()
    assert "\n" not in str(caught.value)
    first.check()
    lease("another checkpoint").acquire()


def test_lease_that_was_given_back_is_free_at_once(lease: Make, tmp_path: Path) -> None:
    first, second = lease(quick=(0.05, 600.0)), lease(quick=(0.05, 600.0))
    first.acquire()
    first.release()
    second.acquire()
    assert second.epoch > 0
    assert len(stored(tmp_path)) == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"version":1}', b"\xff"])
def test_damaged_lease_is_named(lease: Make, tmp_path: Path, content: bytes) -> None:
    first = lease()
    first.acquire()
    first.release()
    stored(tmp_path)[0].write_bytes(content)
    with pytest.raises(StagingError, match=r"the lease leases/\w+/\d+ .* is damaged: delete it"):
        lease().acquire()


def test_run_that_wakes_up_late_is_refused_before_it_writes(lease: Make) -> None:
    late, next_one = lease(), lease()
    late.acquire()
    pause(late)
    next_one.acquire()  # waits until the lease has expired
    next_one.check()
    assert next_one.epoch > late.epoch
    with pytest.raises(FencedError, match=f"epoch {next_one.epoch}, and this run {late.epoch}"):
        late.check()
    late.release()
    next_one.check()


def test_lease_of_a_process_that_died_is_free_at_once(lease: Make, tmp_path: Path) -> None:
    code = (
        "import sys; from feedapi_client.spark.staging.lease import QueryLease; "
        "QueryLease(sys.argv[1], 'checkpoint', 0.05, 600.0).acquire()"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path.as_uri()], check=True, timeout=120)
    assert not json.loads(stored(tmp_path)[0].read_bytes())["released"]
    lease(quick=(0.05, 600.0)).acquire()


def test_run_that_is_over_gives_its_lease_back(lease: Make) -> None:
    first = lease(quick=(600.0, 600.0))
    first.acquire()
    first.in_use = lambda: False
    lease().acquire()


def test_epochs_rise_where_the_leases_were_deleted(
    lease: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases.time, "time", lambda: 2_000_000_000.0)
    first = lease()
    first.acquire()
    assert first.epoch == 2_000_000_000
    pause(first)
    for path in stored(tmp_path):
        path.unlink()
    monkeypatch.setattr(leases.time, "time", lambda: 2_000_000_001.0)
    second = lease()
    second.acquire()
    assert second.epoch > first.epoch


def test_epochs_rise_when_the_clock_goes_back(lease: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases.time, "time", lambda: 4_000_000_000.0)
    first = lease()
    first.acquire()
    first.release()
    monkeypatch.setattr(leases.time, "time", lambda: 1_000_000_000.0)
    second = lease()
    second.acquire()
    assert second.epoch == 4_000_000_001
    pause(second)
    third = lease()
    third.acquire()
    assert third.epoch == 4_000_000_002


def test_run_whose_staging_location_is_deleted_says_so(lease: Make, tmp_path: Path) -> None:
    one = lease()
    one.acquire()
    pause(one)
    for path in stored(tmp_path):
        path.unlink()
    with pytest.raises(StagingError, match="is gone from the staging location"):
        one.check()


def test_one_of_several_that_start_at_once_gets_the_lease(lease: Make) -> None:
    several = [lease() for _ in range(8)]
    refused: list[str] = []

    def acquire(one: QueryLease) -> None:
        try:
            one.acquire()
        except FencedError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=acquire, args=(one,)) for one in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    assert sum(one.epoch > 0 for one in several) == 1


def test_copy_of_a_lease_has_no_claim(lease: Make) -> None:
    first = lease()
    first.acquire()
    copy = pickle.loads(pickle.dumps(first))
    assert (copy.query, copy.epoch) == (first.query, 0)
