"""An option that is gone is a wrong command line, and the error names what does its work."""

from __future__ import annotations

import pytest

from feedapi_client.cli.signature import REMOVED
from tests.cli.conftest import Feedapi

USED = {
    "run --workers": "run http://h/f --handler a:b --store c.db --workers 4",
}


@pytest.mark.parametrize("option", REMOVED)
def test_an_option_that_is_gone_names_its_successor(feedapi: Feedapi, option: str) -> None:
    result = feedapi(*USED[option].split())
    words = option.rpartition(" ")
    assert result.exit_code == 2
    assert f"{words[2]} is gone: {REMOVED[option]} (feedapi {words[0]}" in result.stderr
