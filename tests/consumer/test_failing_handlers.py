"""A handler that fails: what the status, the health and the log say of it."""

from __future__ import annotations

import logging
import traceback

import anyio
import pytest

from feedapi_client import Batch, PartitionState, Retry
from feedapi_client.quarantine.failure_text import failure_traceback
from tests.consumer.helpers import LocalFeed, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

QUICK = Retry(attempts=None, base_delay=0.001, max_delay=0.002)
NAME = "Ragnhild-Sesselja"
BALANCE = 8_261_930_475_516_027  # so that no time of a log record holds it


def people(count: int = 1) -> LocalFeed:
    feed = LocalFeed()
    feed.extend(0, [{"n": n, "name": NAME, "balance": BALANCE} for n in range(count)])
    return feed


async def reject(batch: Batch) -> None:
    """Fail as programs do: with what the event holds in the text of the exception."""
    payload = batch.events[0].json()
    try:
        raise KeyError(payload["balance"])
    except KeyError as error:
        raise ValueError(f"can't book {payload['name']!r} of {payload}") from error


async def test_a_handler_that_fails_is_not_reading_without_an_error() -> None:
    async with people().consume() as consumer, anyio.create_task_group() as tasks:
        attempts = 0

        async def fail_thrice(batch: Batch) -> None:
            nonlocal attempts
            attempts += 1
            if attempts == 4:
                before = consumer.status()[0]
                assert before.attempts == 4
                assert before.handler_failures == 3
                assert before.state is PartitionState.RETRYING
                assert before.error == "the handler failed with ValueError"
                assert before.since is not None
                assert before.in_flight_seconds is not None
                assert before.commit_age_seconds is None
                health = consumer.health()
                assert [each.name for each in health.problems] == ["handler-failing"]
                assert health.problems[0].since == before.since
                assert health.live
                assert not health.ready, "every handler fails"
                return
            await reject(batch)

        tasks.start_soon(lambda: consumer.run(fail_thrice, on_failure=QUICK))
        await wait_until(lambda: consumer.status()[0].committed_at is not None)
        after = consumer.status()[0]
        assert (after.error, after.attempts, after.in_flight_since) == (None, 0, None)
        assert after.handler_failures == 3
        assert after.commit_age_seconds is not None
        assert consumer.health().problems == ()
        tasks.cancel_scope.cancel()


async def test_r19_a_failure_is_logged_with_partition_type_and_frames_and_no_payload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with people().consume() as consumer:
        with pytest.raises(ValueError, match="can't book"):
            await consumer.run(reject, on_failure=Retry(attempts=2, base_delay=0.001))
        shown = f"{consumer.status()} {consumer.health()}"
    retried, final = [each for each in caplog.records if "handler failed" in each.getMessage()]
    assert (retried.levelno, final.levelno) == (logging.WARNING, logging.ERROR)
    assert [vars(each)["attempt"] for each in (retried, final)] == [2, 2]
    for record in (retried, final):
        assert record.name.startswith("feedapi_client.")
        assert vars(record)["partition"] == 0
        assert vars(record)["feed"] == "http://feed/feed"
        text = record.getMessage()
        assert "partition 0" in text
        assert "the handler failed with ValueError" in text
        assert "in reject" in text
        assert "raise KeyError(" in text, "the source of its cause"
        assert "running.py" not in text, "a frame before the handler"
        shown += text + str(vars(record))
    assert "Ragnhild" not in shown
    assert "Sesselja" not in shown
    assert str(BALANCE) not in shown


def test_r19_what_a_driver_raised_below_an_error_of_ours_is_not_quoted() -> None:
    from feedapi_client import StoreError

    try:
        try:
            raise ConnectionError("password is hunter2")
        except ConnectionError as cause:
            raise StoreError("saving cursors failed: ConnectionError") from cause
    except StoreError as error:
        text = failure_traceback(error)
        plain = traceback.format_exception(error)
    assert "hunter2" in "".join(plain)
    assert "ConnectionError\n" in text
    assert "password is" not in text.replace('raise ConnectionError("password is hunter2")', "")
