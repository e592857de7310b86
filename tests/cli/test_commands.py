"""Commands are imported when they are called, share their options, and have help to be read."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise

import pytest

from feedapi_client.cli.app import COMMANDS, FUNCTIONS, MODULES
from feedapi_client.cli.feed_options import Connection
from tests.cli.conftest import Feedapi
from tests.cli.invoke import COMMANDS as TREE
from tests.cli.test_cat_format import leaves

LEAVES = leaves(TREE)
ASK_A_FEED = (
    *("discover", "doctor", "cat", "run", "relay", "status"),
    *("cursors ls", "cursors skip", "cursors drain", "cursors restore"),
)
SHARED = {
    "feedapi_client.cli." + name
    for name in (
        *("app", "escape", "examples", "exit_codes", "feed_options", "reporting", "signature"),
        *("std_streams", "store_options"),
    )
}


def test_every_command_is_in_the_table() -> None:
    groups = {words.partition(" ")[0] for words in COMMANDS if " " in words}
    assert COMMANDS.keys() - groups == LEAVES.keys()


@pytest.mark.parametrize("words", LEAVES)
def test_the_list_of_commands_says_what_their_help_says(words: str) -> None:
    assert LEAVES[words].help.split("\n\n")[0] == COMMANDS[words]


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        ((), set()),
        (("cursors",), set()),
        (("cat",), {"cat"}),
        (("discover",), {"discover"}),
        (("cursors", "rewind"), {"cursors_rewind", "times"}),
        (("relay",), {"relay_to_stream"}),
        (("run",), {"run"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_help_imports_no_other_command(arguments: tuple[str, ...], imported: set[str]) -> None:
    program = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from feedapi_client.cli.app import app\n"
        f"sys.argv = ['feedapi', *{arguments!r}, '--help']\n"
        "with suppress(SystemExit):\n    app(prog_name='feedapi')\n"
        "print(*[name for name in sys.modules if name.startswith('feedapi_client.cli.')])\n"
        "print(*[name for name in ('rich', 'httpx', 'anyio', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *_, modules, heavy = done.stdout.split("\n")[:-1]
    assert set(modules.split()) - SHARED == {f"feedapi_client.cli.{name}" for name in imported}
    assert heavy == ""


@pytest.mark.parametrize("words", ASK_A_FEED)
def test_every_command_that_asks_a_feed_takes_all_credentials(words: str) -> None:
    known = {parameter.name for parameter in LEAVES[words].params}
    assert {field.name for field in fields(Connection)} <= known


@pytest.mark.parametrize("words", sorted(LEAVES.keys() - {"ingest"}))
def test_help_is_wrapped_to_a_terminal_of_80_columns(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = feedapi(*words.split(), "--help").stdout.splitlines()
    wide = [line for line in lines if len(line) > 80 and not line.startswith("  feedapi ")]
    assert wide == []
    assert not any("<bool>" in line or "<str>" in line for line in lines)
    function = words.replace(" ", "_")
    module = sys.modules[f"feedapi_client.cli.{MODULES.get(words, function)}"]
    text = inspect.getdoc(getattr(module, FUNCTIONS.get(words, function)))
    assert text is not None
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
    shown = "\n".join(lines[1:]).split("\n\n")
    for paragraph in paragraphs:
        (wrapped,) = [each for each in shown if " ".join(each.split()) == paragraph]
        rows = wrapped.strip("\n").split("\n")
        for row, following in pairwise(rows):
            assert len(f"{row} {following.split()[0]}") > 78, f"ragged: {row}"


def test_own_options_come_before_those_that_many_commands_share(feedapi: Feedapi) -> None:
    text = feedapi("cat", "--help").stdout
    titles = ["Arguments:", "Options:", "Events:", "Connection:", "Examples:"]
    places = [text.index(f"\n{title}") for title in titles]
    assert places == sorted(places)
