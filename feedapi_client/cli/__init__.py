"""The command line ``feedapi``. Needs the extra ``cli``: pip install 'feedapi-client[cli]'."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit, with an exit code that ``feedapi --help`` explains."""
    if sys.stdout is None or sys.stderr is None:
        # The caller closed them, so there is no way to report anything.
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
