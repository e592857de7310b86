"""The published Python library for dialect v1, and a publisher made with it.

It asks for versions of httpx and FastAPI that this project does not run with, though it works with
those that are there. So it is installed into a folder of its own, without what it asks for.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from feedapi_client.testing.liftbridge import free_port
from tests import components

VERSION = "0.2.3"
_SAFETY_LIMIT = 30.0


def installed() -> Path:
    """Return the folder of the library, which is on the path then.

    Raises:
        components.MissingError: it can't be installed.
    """
    found = find_spec("zeroeventhub")
    if found is None or found.origin is None:
        target = _install()
        sys.path.append(str(target))
        importlib.invalidate_caches()
        return target
    return Path(found.origin).parent.parent


def _install() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "feedapi-client"
    target = cache / f"zeroeventhub-{VERSION}"
    uv = shutil.which("uv")
    pip = [uv, "pip"] if uv else [sys.executable, "-m", "pip"]
    command = [*pip, "install", "-q", "--no-deps", "--target", target, f"zeroeventhub=={VERSION}"]
    with components.locked(cache / "zeroeventhub.lock"):
        if (target / "zeroeventhub").exists():
            return target
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise components.MissingError(f"it can't be installed: {done.stderr.strip()[-200:]}")
    return target


class Reader:
    """What an application serves with the library: lists of events, one for each partition.

    Attributes:
        echoes: an empty page holds the cursor asked with; otherwise nothing.
        fails_behind: the number of events of a page behind which it fails; 0: it does not.
    """

    def __init__(self, partitions: list[list[Any]], *, echoes: bool = True, size: int = 100):
        self._partitions = partitions
        self.echoes = echoes
        self.fails_behind = 0
        self._size = size

    def get_data(
        self, cursors: Any, headers: Any, page_size_hint: int | None
    ) -> Iterator[dict[str, Any]]:
        """Yield the lines of a page."""
        (cursor,) = cursors
        id, log = cursor.partition_id, self._partitions[cursor.partition_id]
        starts = {"_first": 0, "_last": len(log)}
        begin = starts[cursor.cursor] if cursor.cursor in starts else int(cursor.cursor)
        page = log[begin : begin + (page_size_hint or self._size)]
        for number, data in enumerate(page):
            if self.fails_behind and number == self.fails_behind:
                raise RuntimeError("the database is gone")
            yield {"partition": id, "headers": {"h": "1"} if headers else None, "data": data}
            if number % 10 == 9:
                yield {"partition": id, "cursor": str(begin + number + 1)}
        if page:
            yield {"partition": id, "cursor": str(begin + len(page))}
        elif self.echoes:
            yield {"partition": id, "cursor": cursor.cursor}


@contextmanager
def serve(reader: Reader, partitions: int) -> Iterator[str]:
    """Serve the feed with the library's handler. Yield its URL."""
    components.require("zeroeventhub")
    library = importlib.import_module("zeroeventhub")
    app, handler = FastAPI(), library.ZeroEventHubFastApiHandler(reader, partitions)

    @app.get("/feed")
    def feed(request: Request) -> Any:
        return handler.handle(request)

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + _SAFETY_LIMIT
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}/feed"
    finally:
        server.should_exit = True
        thread.join()
