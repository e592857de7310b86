"""``feedapi ingest`` and ``feedapi relay``, whose arguments their adapters parse."""

from __future__ import annotations

from pathlib import Path

import pytest

from feedapi_client.cli.common import extras
from tests.cli.conftest import Feedapi


def test_an_adapter_parses_its_own_arguments(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "adapter_of_the_test.py").write_text(
        "def main(arguments):\n    print(arguments)\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extras, "import_module", lambda name: __import__("adapter_of_the_test"))
    result = feedapi("ingest", "http://h/feed", "out", "--help", "--trigger", "10s")
    assert (result.exit_code, result.stdout) == (
        3,
        "['http://h/feed', 'out', '--help', '--trigger', '10s']\n",
    )


@pytest.mark.parametrize("command", ["ingest", "relay"])
def test_help_comes_from_the_adapter(feedapi: Feedapi, command: str) -> None:
    result = feedapi(command, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"usage: feedapi {command} ")
    assert feedapi(command).exit_code == 2


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [("ingest", "pyspark", "spark"), ("relay", "nats", "liftbridge")],
)
def test_a_missing_extra_says_what_to_install(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch, command: str, missing: str, extra: str
) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(extras, "import_module", import_module)
    result = feedapi(command, "http://h/feed")
    assert result.exit_code == 1
    assert (
        result.stderr
        == f"feedapi: {missing} is not installed: pip install 'feedapi-client[{extra}]'\n"
    )
