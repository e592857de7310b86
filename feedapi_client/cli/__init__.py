"""The command line ``feedapi``. Needs the extra ``cli``: pip install 'feedapi-client[cli]'."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point ``feedapi``. Exits with the code that ``feedapi --help`` explains."""
    if sys.stdout is None or sys.stderr is None:
        # Closed by the caller. There is nobody to tell.
        raise SystemExit(1)
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
