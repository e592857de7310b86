"""The server that the benchmarks of PostgreSQL use."""

from __future__ import annotations

from tests.servers import postgres

__all__ = ["postgres"]
