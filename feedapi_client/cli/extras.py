"""Load what needs an extra of the package only when a command uses it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import typer

from feedapi_client.cli.reporting import CommandError, report

if TYPE_CHECKING:
    import argparse


def run_adapter(context: typer.Context, module: str, extra: str) -> None:
    """Call ``main(arguments, report)`` of an adapter module and exit with the code that it returns.

    Raises `CommandError` when the `extra` that the adapter needs is not installed.
    """
    try:
        adapter = import_module(module)
    except ImportError as missing:
        # Without a name a module is there that can't be loaded, and no extra would help.
        if not {"--help", "-h"}.isdisjoint(context.args):
            print(f"{context.command.help}\n\nInstall it: pip install 'feedapi-client[{extra}]'")
            raise typer.Exit from None
        if "pip install" in str(missing) or missing.name is None:
            raise CommandError(str(missing)) from None
        raise CommandError(
            f"{missing.name} is not installed: pip install 'feedapi-client[{extra}]'"
        ) from None
    if (parser := getattr(adapter, "parser", None)) is not None:
        _check_usage(context, parser())
    raise typer.Exit(adapter.main(context.args, report))


def _check_usage(context: typer.Context, parser: argparse.ArgumentParser) -> None:
    """Parse the adapter's arguments, to report a wrong one as every other command does."""

    def report(message: str) -> NoReturn:
        error = typer.BadParameter(message)
        error.ctx = context
        raise error

    parser.error = report  # type: ignore[method-assign]
    parser.parse_args(context.args)


def require_publisher() -> None:
    """Raise `CommandError` when the publisher of `feedapi_client.testing` can't be served.

    The publisher itself is part of the package. Its server needs the extra ``testing``.
    """
    try:
        from feedapi_client.testing import Serving
    except ImportError as missing:
        raise CommandError(str(missing)) from None
    del Serving
