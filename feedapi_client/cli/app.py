"""All commands of ``feedapi``.

The modules imported here only declare options. The work of a command is imported when it runs, so
that ``--help`` is fast.
"""

from __future__ import annotations

from typing import Annotated

import typer

from feedapi_client.cli import discover, ingest, relay
from feedapi_client.cli.cat.command import cat
from feedapi_client.cli.common.errors import CommandGroup
from feedapi_client.cli.common.exit_codes import HELP as EXIT_CODES
from feedapi_client.cli.common.extras import PASS_ON
from feedapi_client.cli.cursors.app import app as cursors
from feedapi_client.cli.demo.command import demo
from feedapi_client.cli.doctor.command import doctor
from feedapi_client.cli.examples import epilog
from feedapi_client.cli.leases.app import app as leases
from feedapi_client.cli.quarantine.app import app as quarantine
from feedapi_client.cli.run.command import run
from feedapi_client.cli.run.options import EXIT_CODES as RUN_EXIT_CODES
from feedapi_client.cli.serve.command import serve
from feedapi_client.cli.status.command import status

app = typer.Typer(
    cls=CommandGroup,
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


app.command("demo", epilog=epilog("demo"))(demo)
app.command("serve", epilog=epilog("serve"))(serve)
app.command("discover", epilog=epilog("discover"))(discover.discover)
app.command("doctor", epilog=epilog("doctor"))(doctor)
app.command("cat", epilog=epilog("cat"))(cat)
app.command("run", epilog=f"{epilog('run')}\n\n{RUN_EXIT_CODES}")(run)
app.command("status", epilog=epilog("status"))(status)
app.add_typer(cursors, name="cursors")
app.add_typer(leases, name="leases")
app.add_typer(quarantine, name="quarantine")
app.command("ingest", context_settings=PASS_ON, add_help_option=False)(ingest.ingest)
app.command("relay", context_settings=PASS_ON, add_help_option=False)(relay.relay)
