"""Write the golden files of the present formats: ``python -m tests.formats``.

Before 1.0.0 a change of a format rewrites them. From then on the files of a released version stay
as they are: `GOLDEN` then becomes a new folder.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from tests.formats import made
from tests.formats.stores import GOLDEN
from tests.servers import run_mariadb, run_postgres, run_redis


def main() -> None:
    """Write all files."""
    files = {"export.json": made.export(), **made.spark_files()}
    with tempfile.TemporaryDirectory() as folder:
        files["sqlite.sql"] = asyncio.run(made.sqlite(Path(folder)))
    with run_postgres(durable=False) as postgres:
        files["postgresql.sql"] = asyncio.run(made.postgres(postgres))
    with run_mariadb(durable=False) as mariadb:
        files["mariadb.sql"] = asyncio.run(made.mariadb(mariadb))
    with run_redis() as redis:
        files["redis.jsonl"] = asyncio.run(made.redis_commands(redis))
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (GOLDEN / name).write_text(text, encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()
