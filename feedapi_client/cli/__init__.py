"""The command line ``feedapi``. Needs the extra ``cli``: pip install 'feedapi-client[cli]'."""

from __future__ import annotations

import sys

from feedapi_client.cli.common.streams import require_streams


def main() -> None:
    """Run the command line and exit, with an exit code that ``feedapi --help`` explains."""
    require_streams()
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
