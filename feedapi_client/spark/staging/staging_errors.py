"""Errors of the staging location."""

from __future__ import annotations

from feedapi_client.errors import StoreError


class StagingError(StoreError):
    """The staging location failed, or an object in it is not what was written."""


class MissingObjectError(StagingError):
    """A staged object does not exist."""
