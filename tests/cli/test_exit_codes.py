"""One table of exit codes: the help of all commands and the documentation have the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from feedapi_client.cli.command import EXIT_CODES
from tests.cli.conftest import Feedapi
from tests.docs.snippets import PAGES_FOLDER


def test_the_documentation_has_the_table() -> None:
    page = (PAGES_FOLDER / "command-line.md").read_text(encoding="utf-8")
    section = page.partition("## Exit codes")[2]
    assert re.findall(r"^\| (\d[\d, ]*) \| (.+) \|$", section, re.MULTILINE) == list(
        EXIT_CODES.items()
    )


def test_the_help_has_the_table(feedapi: Feedapi) -> None:
    text = " ".join(feedapi("--help").stdout.split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("discover", "http://127.0.0.1:9/feed", "--give-up-after", "0"), 1),
        (("cursors", "ls", "--store", "missing.db"), 1),
        (("discover",), 2),
        (("discover", "ftp://feed"), 2),
        (("run", "http://feed", "--handler", "nothing:handle", "--store", "c.db"), 2),
        (("quarantine", "replay", "--all", "--handler", "nothing:handle", "--store", "c.db"), 2),
        (("doctor", "http://127.0.0.1:9/feed"), 69),
    ],
)
def test_the_same_failure_has_the_same_code_in_every_command(
    feedapi: Feedapi,
    arguments: tuple[str, ...],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = feedapi(*arguments)
    assert result.exit_code == code, result.output
    assert len(result.stderr.strip().splitlines()) == 1
