"""An option that is gone is a wrong command line, and the error names what does its work."""

from __future__ import annotations

import pytest

from feedapi_client.cli.command import REMOVED
from tests.cli.conftest import Feedapi

USED = {
    "cat --checkpoints": "cat http://h/f --checkpoints",
    "cat --format %k": "cat http://h/f --format %k",
    "cat --format %K": "cat http://h/f --format %K",
    "cat --from TIME": "cat http://h/f --store c.db --from 14:30",
    "cat --journal": "cat http://h/f --store c.db --journal",
    "cat --key": "cat http://h/f --key order.id",
    "cursors --feed": "cursors reset --store c.db --feed http://h/f",
    "cursors ls --url": "cursors ls --store c.db --url http://h/f",
    "cursors upgrade": "cursors upgrade --store c.db",
    "leases --feed": "leases ls --store c.db --feed http://h/f",
    "quarantine --feed": "quarantine drop --all --store c.db --feed http://h/f",
    "run --start": "run http://h/f --handler a:b --store c.db --start first",
    "cursors export --output": "cursors export --store c.db --output c.json",
    "cursors export -o": "cursors export --store c.db -o c.json",
    "demo --plain": "demo --plain",
    "doctor --max-bytes": "doctor http://h/f --max-bytes 100000",
    "serve --entities": "serve --entities 5",
    "serve --max-events": "serve --max-events 5",
    "status --name": "status localhost:1 --name app",
    "status --store": "status http://h/f --store c.db",
    "status --v1-partitions": "status http://h/f --v1-partitions 2",
    "run --workers": "run http://h/f --handler a:b --store c.db --workers 4",
}


@pytest.mark.parametrize("option", REMOVED)
def test_an_option_that_is_gone_names_its_successor(feedapi: Feedapi, option: str) -> None:
    result = feedapi(*USED[option].split())
    assert result.exit_code == 2
    assert f" is gone: {REMOVED[option]} (feedapi " in result.stderr
