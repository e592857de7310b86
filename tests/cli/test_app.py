"""What all commands share: help, version, and errors on one line."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from feedapi_client import __version__
from feedapi_client.client import FeedClient
from tests.cli.conftest import Feedapi


def test_help_lists_the_commands_and_the_exit_codes(feedapi: Feedapi) -> None:
    result = feedapi("--help")
    assert result.exit_code == 0
    for word in (
        "demo",
        "serve",
        "discover",
        "cat",
        "cursors",
        "quarantine",
        "ingest",
        "relay",
        "Exit codes",
    ):
        assert word in result.stdout


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "serve",
        "discover",
        "cat",
        "cursors ls",
        "cursors show",
        "cursors set",
        "cursors reset",
        "cursors export",
        "cursors import",
        "cursors rewind",
    ],
)
def test_every_command_has_help(feedapi: Feedapi, command: str) -> None:
    result = feedapi(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_version(feedapi: Feedapi) -> None:
    assert feedapi("--version").stdout == f"feedapi {__version__}\n"


def test_without_a_command_there_is_help_and_a_usage_error(feedapi: Feedapi) -> None:
    result = feedapi()
    assert result.exit_code == 2
    assert result.output.count("Usage:") == 1


def test_help_imports_nothing_that_only_a_command_needs() -> None:
    heavy = (
        "sqlalchemy",
        "redis",
        "uvicorn",
        "pyspark",
        "nats",
        "rich.live",
        "feedapi_client.testing.publisher",
    )
    code = (
        "import sys, feedapi_client.cli.app\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        == "[]\n"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["cat"], "Missing argument"),
        (["cat", "http://localhost/feed", "--bogus"], "No such option: --bogus"),
        (["cat", "http://localhost/feed", "--limit", "0"], "--limit"),
        (["cat", "http://localhost/feed", "--filter", "a"], "takes NAME=VALUE"),
        (["cat", "http://localhost/feed", "--from", "abc"], "--from CURSOR needs one --partition"),
        (
            ["cat", "http://localhost/feed", "--event-type", "a", "--skip-event-type", "b"],
            "exclude each other",
        ),
        (
            ["cat", "http://localhost/feed", "--stream", "--page-size-hint", "5"],
            "exclude each other",
        ),
        (["cat", "http://localhost/feed", "--name", "me"], "and --feed-name need --store"),
        (["cat", "http://localhost/feed", "--feed-name", "me"], "and --feed-name need --store"),
        (["cat", "http://localhost/feed", "--store", "x", "--feed-name", ""], "--feed-name"),
        (
            ["discover", "http://localhost/feed", "--auth-env", "NOT_SET_ANYWHERE"],
            "NOT_SET_ANYWHERE is not set",
        ),
        (["serve", "--dialect", "v3"], "v3"),
        (["serve", "--dialect", "v1", "--split-every", "1"], "no splits"),
        (["demo", "--dialect", "v1"], "v1"),
        (["cursors", "rewind", "--to", "the day before", "--store", "x"], "is no time"),
        (["cursors", "set", "0", "a b\x07", "--store", "x"], "printable ASCII"),
    ],
)
def test_a_wrong_command_line_is_reported_on_one_line_with_exit_code_2(
    feedapi: Feedapi, args: list[str], words: str
) -> None:
    result = feedapi(*args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("feedapi: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def _break(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("a payload with a secret")

    monkeypatch.setattr(FeedClient, "discover", broken)


def test_r19_an_internal_error_is_reported_on_one_line_without_its_text(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break(monkeypatch)
    monkeypatch.delenv("FEEDAPI_DEBUG", raising=False)
    result = feedapi("discover", "http://localhost/feed")
    assert result.exit_code == 70
    assert result.stderr == "feedapi: internal error: KeyError (set FEEDAPI_DEBUG=1 to see where)\n"


def test_feedapi_debug_shows_the_traceback(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break(monkeypatch)
    monkeypatch.setenv("FEEDAPI_DEBUG", "1")
    assert isinstance(feedapi("discover", "http://localhost/feed").exception, KeyError)


def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = "import sys\nsys.modules['typer'] = None\nfrom feedapi_client.cli import main\nmain()"
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stderr == "feedapi: typer is not installed: pip install 'feedapi-client[cli]'\n"
