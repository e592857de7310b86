"""All commands of ``feedapi``. What a command needs beyond its options is imported when it runs, so that ``--help`` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from feedapi_client.cli import cat, cursors, demo, discover, external, quarantine, serve
from feedapi_client.cli.report import EXIT_CODES, Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from feedapi_client import __version__

        print(f"feedapi {__version__}")
        raise typer.Exit


@app.callback()
def feedapi(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log requests and decisions to stderr.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Consume FeedAPI feeds: partitioned events over plain HTTP, each event in order and once."""
    if verbose:
        import logging

        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )


app.command("demo")(demo.demo)
app.command("serve")(serve.serve)
app.command("discover")(discover.discover)
app.command("cat")(cat.cat)
app.add_typer(cursors.app, name="cursors")
app.add_typer(quarantine.app, name="quarantine")
app.command("ingest", context_settings=external.PASS_ON, add_help_option=False)(external.ingest)
app.command("relay", context_settings=external.PASS_ON, add_help_option=False)(external.relay)
