"""Small things that cost trust: messages, exit codes and files of the commands."""

from __future__ import annotations

import builtins
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from select import select
from typing import Any, ClassVar

import pytest

from feedapi_client import RetryPolicy
from feedapi_client.cli.terminal import say
from feedapi_client.errors import StoreError
from feedapi_client.testing import Publisher
from tests.cli.conftest import TIMEOUT, Feedapi, Spawn

Make = Callable[..., Publisher]


@pytest.fixture
def filled(feedapi: Feedapi, feedapi_publisher: Publisher, journalled_store: Path) -> Path:
    feedapi_publisher.append(0, {"n": 1})
    done = feedapi("cat", feedapi_publisher.url, "--store", journalled_store)
    assert done.exit_code == 0
    return journalled_store


# ---------------------------------------------------------------------- rewind


def test_a_dry_run_of_rewind_fails_where_the_rewind_does(
    feedapi: Feedapi, feedapi_publisher: Publisher, journalled_store: Path
) -> None:
    store, before = journalled_store, datetime.now(UTC)
    while datetime.now(UTC) <= before:  # until the clock has moved on
        time.sleep(0)
    assert feedapi("cat", feedapi_publisher.url, "--store", store).exit_code == 0
    rewind = ("cursors", "rewind", "--store", store, "--to", before.isoformat())
    real, dry = (feedapi(*rewind, option) for option in ("--yes", "--dry-run"))
    assert (dry.exit_code, dry.stderr) == (real.exit_code, real.stderr)
    assert real.exit_code == 1
    assert dry.stdout == ""


def test_a_dry_run_names_the_time_that_repeats_it(feedapi: Feedapi, filled: Path) -> None:
    result = feedapi("cursors", "rewind", "--store", filled, "--to", "now", "--dry-run")
    to = result.stdout.splitlines()[-1].rpartition("--to ")[2]
    again = feedapi("cursors", "rewind", "--store", filled, "--to", to, "--yes")
    assert again.exit_code == 0


# ---------------------------------------------------------------------- where the store is


def test_a_store_in_a_folder_that_is_missing_names_the_folder(
    feedapi: Feedapi, feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    folder = tmp_path / "no" / "folder"
    result = feedapi("cat", feedapi_publisher.url, "--store", folder / "cursors.db")
    assert result.exit_code == 1
    assert f"there is no folder {folder}" in result.stderr


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("cat",), "--store"),
        (("run", "--handler", "tests.cli.test_cat_format:handle"), "--store"),
        (
            ("relay", "--stream", "s", "--store", "c.db", "--oversized", "quarantine"),
            "--quarantine",
        ),
    ],
    ids=["cat", "run", "relay"],
)
def test_a_folder_in_place_of_a_store_is_named(
    feedapi: Feedapi, tmp_path: Path, command: tuple[str, ...], option: str
) -> None:
    result = feedapi(*command, "http://127.0.0.1:9/feed", option, tmp_path)
    assert result.exit_code == 2
    assert f"{option}: {tmp_path} is a folder: name a file in it" in result.stderr


# ---------------------------------------------------------------------- a feed that is asked once


def test_a_command_that_asks_once_gives_up_soon(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    """A refusal after 5 seconds, a feed that can't be reached after 10."""
    asked = []

    def record(*_: object, retry: RetryPolicy, **__: object) -> None:
        asked.append((retry.refused_for, retry.give_up_after))
        raise StoreError("enough is known")

    monkeypatch.setattr("feedapi_client.consumer.FeedConsumer", record)
    monkeypatch.setattr("feedapi_client.FeedClient", record)
    for command in (("discover",), ("cat",), ("cat", "--give-up-after", 3), ("cat", "--follow")):
        result = feedapi(*command, "http://127.0.0.1:9/feed")
        assert (result.exit_code, "enough" in result.stderr) == (1, True), result.output
    assert asked == [(5, 10), (5, 10), (5, 3), (RetryPolicy().refused_for, None)]


@pytest.mark.parametrize("command", ["discover", "cat"])
def test_a_failed_attempt_is_said_once(spawn: Spawn, command: str) -> None:
    process = spawn(command, "http://127.0.0.1:9/feed", "--give-up-after", 3)
    _, errors = process.communicate(timeout=TIMEOUT)
    attempt, result = errors.decode().splitlines()
    assert process.returncode == 1
    assert "; attempt 2 in " in attempt
    assert result.startswith("feedapi: ")


# ---------------------------------------------------------------------- secrets in arguments


@pytest.mark.parametrize(
    "options",
    [
        ("--header-env", "X-Api-Key=hunter2-secret"),
        ("--header-env", "X-Api-Key: hunter2-secret"),
        ("--auth-env", "Bearer hunter2-secret"),
    ],
)
def test_r19_a_secret_in_the_place_of_a_variable_is_not_repeated(
    feedapi: Feedapi, options: tuple[str, str]
) -> None:
    result = feedapi("discover", "http://127.0.0.1:9/feed", *options)
    assert result.exit_code == 2
    assert "hunter2" not in result.stderr
    assert "environment variable" in result.stderr
    assert "arguments are visible to others" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        (
            *("relay", "http://127.0.0.1:9/feed", "--stream", "orders", "--store", "x.db"),
            *("--nats-env", "nats://me:hunter2@host"),
        ),
        (
            *("relay", "http://127.0.0.1:9/feed", "--stream", "orders", "--store", "x.db"),
            *("--api", "127.0.0.1:9", "--api-tls", "--api-token-env", "hunter2-token"),
        ),
        ("serve", "--bearer-env", "Bearer hunter2"),
        ("cursors", "ls", "--store", "env:postgresql://me:hunter2@host/db"),
        ("cursors", "ls", "--store", "liftbridges://broker:1/orders?token_env=hunter2-token"),
    ],
    ids=["nats", "api", "bearer", "store", "ledger"],
)
def test_r19_other_options_do_not_repeat_it_either(
    feedapi: Feedapi, command: tuple[str, ...]
) -> None:
    result = feedapi(*command)
    assert result.exit_code in (1, 2)
    assert "hunter2" not in result.stderr + result.stdout
    assert "takes the name of an environment variable" in " ".join(result.stderr.split())


# ---------------------------------------------------------------------- the end of the output


@pytest.mark.parametrize("command", ["discover", "doctor"])
def test_a_closed_pipe_is_a_regular_end(
    spawn: Spawn, feedapi_publisher: Publisher, command: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = spawn(command, feedapi_publisher.url, stdout=writing)
    os.close(writing)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, errors) == (0, b"")


def test_ctrl_c_at_a_question_is_an_interruption(filled: Path, spawn: Spawn) -> None:
    import pty

    ours, theirs = pty.openpty()
    process = spawn(
        *("cursors", "reset", "--store", filled),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        # A shell starts what runs in the background, as these tests may, with SIGINT ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    shown = b""
    while b"?" not in shown:
        shown += os.read(ours, 1024)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # raised when the process closed its end of the terminal
        while True:
            # CPython sees a signal that comes just before input() reads only after the read.
            if not select([ours], [], [], 5.0)[0]:
                process.send_signal(signal.SIGINT)
            elif chunk := os.read(ours, 1024):
                shown += chunk
            else:
                break
    os.close(ours)
    assert process.wait(TIMEOUT) == 130
    assert b"Traceback" not in shown


def test_no_at_a_question_is_a_failure(feedapi: Feedapi, filled: Path) -> None:
    assert feedapi("cursors", "reset", "--store", filled, input="n\n").exit_code == 1


# ---------------------------------------------------------------------- extras


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, ImportError], None]:
    """Return a function that makes the import of a module fail."""
    real = builtins.__import__

    def forget(module: str, error: ImportError) -> None:
        def fail(
            name: str, scope: Any = None, local: Any = None, names: Any = (), level: int = 0
        ) -> Any:
            if level == 0 and name.partition(".")[0] == module:
                raise error
            return real(name, scope, local, names, level)

        monkeypatch.setattr(builtins, "__import__", fail)

    return forget


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("postgresql://h/db", "psycopg", "postgresql"),
        ("postgresql+asyncpg://h/db", "asyncpg", "asyncpg"),
        ("sqlite:///x.db", "aiosqlite", "sqlite"),
        ("mysql://h/db", "asyncmy", "mysql"),
    ],
)
def test_a_missing_driver_names_the_extra_that_brings_it(
    feedapi: Feedapi,
    without: Callable[[str, ImportError], None],
    url: str,
    module: str,
    extra: str,
) -> None:
    without(module, ModuleNotFoundError(f"No module named {module!r}", name=module))
    relay = ("relay", "http://127.0.0.1:9/feed", "--stream", "s", "--store", "c.db")
    for command in (
        ("cursors", "ls", "--store"),
        (*relay, "--oversized", "quarantine", "--quarantine"),
    ):
        result = feedapi(*command, url)
        assert result.exit_code == 1
        assert f"pip install 'feedapi-client[{extra}]'" in result.stderr


@pytest.mark.parametrize(
    ("url", "extra"), [("postgresql://h/db", "postgresql"), ("mysql://h/db", "mysql")]
)
def test_without_sqlalchemy_the_extra_with_the_driver_is_named(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch, url: str, extra: str
) -> None:
    for name in ("sqlalchemy", "sqlalchemy.ext.asyncio"):
        monkeypatch.setitem(sys.modules, name, None)
    result = feedapi("cursors", "ls", "--store", url)
    assert f"pip install 'feedapi-client[{extra}]'" in result.stderr


def test_a_driver_that_can_not_be_loaded_is_named_without_secrets(
    feedapi: Feedapi, without: Callable[[str, ImportError], None]
) -> None:
    without("asyncmy", ImportError("libssl.so.3: cannot open shared object file"))
    result = feedapi("cursors", "ls", "--store", "mysql://user:hunter2@h/db")
    assert result.exit_code == 1
    assert "libssl.so.3" in result.stderr
    assert "hunter2" not in result.stderr


# ---------------------------------------------------------------------- adapters


@pytest.mark.parametrize("command", ["relay", "ingest"])
def test_adapters_report_wrong_arguments_as_other_commands_do(
    feedapi: Feedapi, command: str
) -> None:
    result = feedapi(command, "http://h/feed", "--nonsense")
    assert result.exit_code == 2
    assert result.stderr.startswith("feedapi: ")
    assert result.stderr.endswith(f" {command} --help says more)\n")
    assert result.stderr.count("\n") == 1


def test_a_line_of_ours_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a log record of another thread comes between its text and its end."""

    class Stderr(io.StringIO):
        written: ClassVar[list[str]] = []

        def write(self, text: str) -> int:
            self.written.append(text)
            return len(text)

    monkeypatch.setattr("sys.stderr", Stderr())
    say("monitor at http://127.0.0.1:9464/")
    assert Stderr.written == ["feedapi: monitor at http://127.0.0.1:9464/\n"]
