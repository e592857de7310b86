"""R19: what the commands print, against publishers that echo what they are asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.invoke import invoke
from tests.faults.feed import FaultyFeed
from tests.faults.responses import whole
from tests.faults.server import RawServer
from tests.secrets.capture import Shown, capture
from tests.secrets.echoes import ECHOES, HEADER, STATUSES, echo, with_secrets


def _run(shown: Shown, *arguments: str) -> None:
    done = invoke(arguments, env={"API_KEY": HEADER, "COLUMNS": "200"})
    where = " ".join(argument for argument in arguments if "://" not in argument)
    printed = done.stderr if arguments[0] == "cat" else done.output  # cat prints payloads
    shown.add(f"feedapi {where}", printed)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ECHOES)
def test_r19_no_command_shows_a_secret(server: RawServer, tmp_path: Path, variant: str) -> None:
    store = str(tmp_path / "cursors.db")
    healthy = FaultyFeed("fetch", whole, 0)
    with capture() as shown:
        header = ("--header-env", "X-Api-Key=API_KEY")
        healthy_url = with_secrets(server.add(healthy.reply).url)
        _run(shown, "cat", healthy_url, "--store", store, *header)
        for command in ("ls", "export"):
            _run(shown, "cursors", command, "--store", store)
        for status in STATUSES:
            url = with_secrets(
                server.add(lambda request, s=status: echo(request, s, ECHOES[variant])).url
            )
            _run(shown, "discover", url, "--give-up-after", "0", *header)
            _run(shown, "cat", url, "--give-up-after", "0", *header)
    assert (tmp_path / "cursors.db").exists()
    assert shown.leaks() == []
