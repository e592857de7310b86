"""The servers that programs of the documentation are run against."""

from __future__ import annotations

from tests.servers import postgres

__all__ = ["postgres"]
