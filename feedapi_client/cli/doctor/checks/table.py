"""The checks of ``feedapi doctor``: `CHECKS` is the whole table."""

from __future__ import annotations

from feedapi_client.cli.doctor.checks.base import Check
from feedapi_client.cli.doctor.checks.discovery_rows import DISCOVERY
from feedapi_client.cli.doctor.checks.http_rows import HTTP
from feedapi_client.cli.doctor.checks.page_rows import PAGES
from feedapi_client.cli.doctor.checks.request_rows import REQUESTS

SECTIONS: dict[str, tuple[Check, ...]] = {
    "Discovery and lineage": DISCOVERY,
    "Responses": HTTP,
    "Pages and cursors": PAGES,
    "Arguments": REQUESTS,
}
"""The checks, by the heading they stand under in the documentation."""

CHECKS: tuple[Check, ...] = tuple(check for checks in SECTIONS.values() for check in checks)
