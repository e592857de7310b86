"""Errors of the staging location."""

from __future__ import annotations

from feedapi_client.errors import StoreError


class StagingError(StoreError):
    """The staging location failed, or an object in it is not what was written."""


class MissingObjectError(StagingError):
    """A staged object does not exist."""


def newer_format(what: str, found: int, known: int) -> str:
    """Return what to say of something stored in a format that this version does not read."""
    return (
        f"{what} was written by a newer version of feedapi_client (format {found}, this one reads "
        f"up to {known}): run the query with that version"
    )
