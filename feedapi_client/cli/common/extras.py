"""Load what needs an extra of the package only when a command uses it."""

from __future__ import annotations

from importlib import import_module

import typer

from feedapi_client.cli.common.errors import CommandError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Context settings of a command that passes all arguments on to an adapter, --help included."""


def run_adapter(context: typer.Context, module: str, extra: str) -> None:
    """Call ``main(arguments)`` of an adapter module and exit with the code that it returns.

    Raises `CommandError` when the `extra` that the adapter needs is not installed.
    """
    try:
        adapter = import_module(module)
    except ImportError as missing:
        says_what_to_install = "pip install" in str(missing)
        raise CommandError(
            str(missing)
            if says_what_to_install
            else f"{missing.name} is not installed: pip install 'feedapi-client[{extra}]'"
        ) from None
    raise typer.Exit(adapter.main(context.args))


def require_publisher() -> None:
    """Raise `CommandError` when the publisher of `feedapi_client.testing` can't be served.

    The publisher itself is part of the package. Its server needs the extra ``testing``.
    """
    try:
        from feedapi_client.testing import Serving
    except ImportError as missing:
        raise CommandError(str(missing)) from None
    del Serving
