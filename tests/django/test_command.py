"""A management command that derives from `ConsumeCommand`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from feedapi_client import Limits, Retry, RetryPolicy
from feedapi_client.testing import Publisher
from tests.django.databases import execute, set_up
from tests.django.test_transactions import effects, feed, insert, using

set_up()

from feedapi_client.django.command import ConsumeCommand  # noqa: E402 - Django has its settings

__all__ = ["feed", "using"]

pytestmark = pytest.mark.slow
QUICK = Retry(attempts=None, base_delay=0.01, max_delay=0.02)


class Command(ConsumeCommand):
    """Writes the effects, then does what a test wants."""

    options = {"limits": Limits(poll_interval=0.01, max_poll_interval=0.05)}  # noqa: RUF012
    on_failure = QUICK

    def __init__(self, feed: Publisher, using: str, also: Callable[[Any], object]) -> None:
        super().__init__()
        self.url, self.using, self.also = str(feed.url), using, also

    def apply(self, batch: Any) -> None:
        insert(self.using, batch)
        self.also(batch)


@pytest.fixture
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("threads", [1, 3])
def test_r05_each_event_is_applied_once_in_every_database(
    feed: Publisher, using: str, threads: int
) -> None:
    feed.extend(1, [{"n": n} for n in range(20, 40)])
    for _ in range(2):
        call_command(Command(feed, using, lambda _: None), once=True, threads=threads)
        assert effects(using) == list(range(40))


def test_r05_a_batch_that_fails_is_rolled_back_and_comes_again(feed: Publisher, using: str) -> None:
    failures = iter([True, False, True, True])

    def fail(batch: Any) -> None:
        if next(failures, False):
            raise ZeroDivisionError

    call_command(Command(feed, using, fail), once=True)
    assert effects(using) == list(range(20))


def test_what_fails_goes_into_the_quarantine_of_the_same_database(
    feed: Publisher, using: str
) -> None:
    def fail(batch: Any) -> None:
        if any(event.json()["n"] == 7 for event in batch):
            raise ZeroDivisionError

    command = Command(feed, using, fail)
    command.on_failure = "quarantine"
    call_command(command, once=True)
    assert effects(using) == [n for n in range(20) if n != 7]
    ((payload, error),) = execute(using, "SELECT payload, error_type FROM feedapi_quarantine")
    assert (json.loads(bytes(payload)), error) == ({"n": 7}, "ZeroDivisionError")


def test_sigterm_ends_the_command_after_the_batch_in_flight(
    feed: Publisher, using: str, signals: None
) -> None:
    applied: list[int] = []

    def end(batch: Any) -> None:
        applied.append(len(batch))
        os.kill(os.getpid(), signal.SIGTERM)

    call_command(Command(feed, using, end))
    assert effects(using) == list(range(applied[0]))
    assert len(applied) == 1


def test_threads_have_to_be_one_or_more(feed: Publisher, using: str) -> None:
    with pytest.raises(CommandError, match="--threads takes 1 or more"):
        call_command(Command(feed, using, lambda _: None), threads=0)
    assert effects(using) == []


def test_an_error_of_the_feed_ends_the_command_in_one_line(feed: Publisher, using: str) -> None:
    feed.fail(404, times=1_000_000)
    command = Command(feed, using, lambda _: None)
    command.options = {"retry": RetryPolicy(refused_for=0)}
    with pytest.raises(CommandError, match=r"^ProtocolError: feed http.*404"):
        call_command(command)


def test_a_command_without_url_or_apply_says_what_is_missing(feed: Publisher, using: str) -> None:
    with pytest.raises(CommandError, match="must set url"):
        call_command(ConsumeCommand())

    class Unfinished(ConsumeCommand):
        on_failure = "raise"

    unfinished = Unfinished()
    unfinished.url, unfinished.using = str(feed.url), using
    with pytest.raises(NotImplementedError, match=r"must define apply\(self, batch\)"):
        call_command(unfinished)
    connections[using].close()
