"""``feedapi ingest``, whose arguments its adapter parses, and extras that are missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from feedapi_client.cli import ingest
from tests.cli.conftest import Feedapi


def test_an_adapter_parses_its_own_arguments(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "adapter_of_the_test.py").write_text(
        "from argparse import Namespace\n"
        "def parser(): return Namespace(parse_args=str)\n"
        "def main(arguments, report):\n    report(arguments)\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ingest, "import_module", lambda name: __import__("adapter_of_the_test"))
    result = feedapi("ingest", "http://h/feed", "out", "--help", "--trigger", "10s")
    assert (result.exit_code, result.stdout) == (
        3,
        "['http://h/feed', 'out', '--help', '--trigger', '10s']\n",
    )


def test_help_comes_from_the_adapter(feedapi: Feedapi) -> None:
    result = feedapi("ingest", "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("usage: feedapi ingest ")
    assert feedapi("ingest").exit_code == 2


def test_a_missing_extra_says_what_to_install(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, extra = "pyspark", "spark"

    def import_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(ingest, "import_module", import_module)
    result = feedapi("ingest", "http://h/feed")
    assert result.exit_code == 1
    assert (
        result.stderr
        == f"feedapi: {missing} is not installed: pip install 'feedapi-client[{extra}]'\n"
    )


def test_a_relay_without_its_extra_says_what_to_install(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("feedapi_client.liftbridge")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nats", None)
    for arguments in (
        ("relay", "http://h/feed", "--stream", "s", "--store", "c.db"),
        ("cursors", "ls", "--store", "liftbridge://h:1/s"),
    ):
        result = feedapi(*arguments)
        assert result.exit_code == 1
        assert "pip install 'feedapi-client[liftbridge]'" in result.stderr
