"""The page of ``feedapi doctor`` shows the checks that the command works by."""

from __future__ import annotations

import re

from feedapi_client.cli.command import UNREACHABLE
from feedapi_client.cli.doctor import Bounds
from feedapi_client.cli.doctor.command import sections
from tests.docs.doctor_page import PAGE, rendered

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_checks_are_those_of_the_command() -> None:
    assert rendered() == TEXT


def test_every_check_has_an_anchor_and_one_for_each_that_it_took_in() -> None:
    ids = [id for section in sections() for check in section for id in (check.id, *check.was)]
    assert re.findall(r'<a id="([\w-]+)">', TEXT) == ids
    assert len(ids) == len(set(ids))


def test_bounds_and_exit_code_are_those_of_the_command() -> None:
    bounds = Bounds()
    for words in (
        f"{bounds.max_requests} requests",
        f"{bounds.max_bytes // 1024**2} MiB",
        f"{bounds.page_bytes // 1024**2} MiB of each page",
        f"{bounds.pages} pages of each of {bounds.partitions} partitions",
        f"{bounds.timeout:g} seconds for a request",
        f"; {UNREACHABLE} the feed could not be reached",
    ):
        assert words in TEXT
