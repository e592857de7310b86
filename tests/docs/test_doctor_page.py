"""The page of ``feedapi doctor`` shows the table that the command works by."""

from __future__ import annotations

import re

from feedapi_client.cli.command import UNREACHABLE
from feedapi_client.cli.doctor import bounds
from feedapi_client.cli.doctor.report import CHECKS
from tests.docs.doctor_page import PAGE, rendered

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_is_that_of_the_command() -> None:
    assert rendered() == TEXT


def test_every_check_has_an_anchor() -> None:
    assert re.findall(r'<a id="([\w-]+)">', TEXT) == [check.id for check in CHECKS]


def test_the_bounds_are_those_of_the_command() -> None:
    assert f"{bounds.MAX_REQUESTS} requests" in TEXT
    assert f"{bounds.MAX_BYTES // 1024**2} MiB" in TEXT
    assert f"{bounds.PAGE_BYTES // 1024**2} MiB of each page" in TEXT
    assert f"{bounds.PAGES_READ} pages of each of {bounds.SAMPLED_PARTITIONS} partitions" in TEXT
    assert f"{bounds.TIMEOUT:g} seconds for a request" in TEXT


def test_the_exit_code_is_that_of_the_command() -> None:
    assert f"; {UNREACHABLE} the feed could not be reached" in TEXT
