"""Whether a feed could be reached at all, so that checks mean something."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from feedapi_client.cli.common.errors import UnreachableError
from feedapi_client.cli.doctor.answers import Problem
from feedapi_client.cli.doctor.evidence import Evidence


def without_credentials(url: str) -> str:
    """Return the URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def check_reached(evidence: Evidence) -> None:
    """Raise `UnreachableError` unless the first discovery says something about the publisher."""
    found = evidence.first
    if found is None:
        raise UnreachableError(f"feed {evidence.feed}: nothing could be asked")
    answer = found.answer
    if answer.status in (401, 403):
        raise UnreachableError(
            f"feed {evidence.feed}: {answer}. Give credentials with --auth-env or --header-env"
        )
    if answer.may_pass and answer.problem is not Problem.BROKEN:
        raise UnreachableError(f"feed {evidence.feed}: {answer}")
    if answer.status == 400 and found.info is None:
        raise UnreachableError(
            f"feed {evidence.feed}: {answer}. That is how a ZeroEventHub (v1) feed answers "
            "discovery: give --v1-partitions, the number of partitions that its publisher "
            "documents"
        )
