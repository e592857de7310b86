from __future__ import annotations

from tests.servers import mariadb, postgres, redis_server

__all__ = ["mariadb", "postgres", "redis_server"]
