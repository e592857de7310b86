"""The command line ``feedapi``. Needs the extra ``cli``: pip install 'feedapi-client[cli]'."""

from __future__ import annotations

import os
import signal
import sys

from feedapi_client.cli.terminal import prepare_streams


def main() -> None:
    """Run the command line and exit, with an exit code that ``feedapi --help`` explains."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if command == "run" and sys.platform != "win32":
        # Until it has signal handlers of its own, which takes the import of the application and of
        # a database driver. Without one, the first process of a container ignores SIGTERM.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end_before_start)
    prepare_streams()
    try:
        from feedapi_client.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name is not None and missing.name.startswith("feedapi_client"):
            raise
        sys.stderr.write(
            f"feedapi: {missing.name} is not installed: pip install 'feedapi-client[cli]'\n"
        )
        raise SystemExit(1) from None
    app(prog_name="feedapi")


def _end_before_start(*_: object) -> None:
    """End at once: nothing is in flight yet.

    No exception: Python drops one that strikes in a callback, such as those of weak references.
    """
    os._exit(0)
