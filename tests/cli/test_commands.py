"""Commands are imported when they are called, share their options, and have help to be read."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from feedapi_client.cli.options import Connection
from feedapi_client.testing import Publisher
from tests.cli.conftest import Feedapi
from tests.cli.invoke import LEAVES

ASK_A_FEED = (
    *("discover", "doctor", "cat", "run", "relay", "status"),
    *("cursors ls", "cursors skip", "cursors drain", "cursors restore"),
)
SHARED = {"app", "command", "options", "terminal"}


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        (("cursors", "--help"), {"cursors"}),
        (("cat", "--help"), {"cat"}),
        (("discover", "--help"), {"discover"}),
        (("relay", "--help"), {"relay"}),
        (("run", "--help"), {"run"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_help_imports_no_other_command(arguments: tuple[str, ...], imported: set[str]) -> None:
    program = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from feedapi_client.cli.app import app\n"
        f"sys.argv = ['feedapi', *{arguments!r}]\n"
        "with suppress(SystemExit):\n    app(prog_name='feedapi')\n"
        "print(*[name for name in sys.modules if name.startswith('feedapi_client.cli.')])\n"
        "print(*[name for name in ('httpx', 'anyio', 'grpc', 'sqlalchemy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *_, modules, heavy = done.stdout.split("\n")[:-1]
    own = {name.removeprefix("feedapi_client.cli.") for name in modules.split()}
    assert own - SHARED == imported
    assert heavy == ""


@pytest.mark.parametrize("words", ASK_A_FEED)
def test_every_command_that_asks_a_feed_takes_all_credentials(words: str) -> None:
    known = {parameter.name for parameter in LEAVES[words].params}
    assert {field.name for field in fields(Connection)} <= known


@pytest.mark.parametrize("words", sorted(LEAVES.keys() - {"ingest"}))
def test_help_fits_a_terminal_of_80_columns(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = feedapi(*words.split(), "--help").stdout.splitlines()
    assert [line for line in lines if len(line) > 80 or "<bool>" in line] == []


@pytest.mark.parametrize("words", ["run", "relay"])
def test_each_option_of_run_and_relay_has_an_environment_variable(words: str) -> None:
    missing = [each.name for each in LEAVES[words].params if not each.envvar]
    assert missing == []
    assert {each.name: each.envvar for each in LEAVES[words].params}["give_up_after"] == (
        "FEEDAPI_GIVE_UP_AFTER"
    )


def test_feed_store_and_name_come_from_the_environment_in_every_command() -> None:
    variables = {"url": "FEEDAPI_URL", "store": "FEEDAPI_STORE", "name": "FEEDAPI_NAME"}
    others = [
        (words, each.name)
        for words, leaf in LEAVES.items()
        for each in leaf.params
        if each.name in variables and each.envvar != variables[each.name]
    ]
    assert others == []


def test_a_feed_of_the_environment_leaves_the_other_arguments_their_places(
    feedapi: Feedapi, feedapi_publisher: Publisher, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedapi_publisher.append(0, {"n": 1})
    monkeypatch.setenv("FEEDAPI_URL", feedapi_publisher.url or "")
    monkeypatch.setenv("FEEDAPI_STORE", str(store))
    monkeypatch.setenv("FEEDAPI_NAME", "me")
    assert feedapi("cat").exit_code == 0
    drained = feedapi("cursors", "drain", 0, "--yes", "--force")
    assert drained.exit_code == 0, drained.output
    assert f"me @ {feedapi_publisher.url}: partition 0 is drained" in drained.stdout
