"""Build `FetchOptions` from the options of a command."""

from __future__ import annotations

import typer

from feedapi_client.cli.common.options import pairs
from feedapi_client.options import FetchOptions


def fetch_options(
    filters: list[str] | None = None,
    event_types: list[str] | None = None,
    skip_event_types: list[str] | None = None,
    *,
    page_size_hint: int | None = None,
    stream: bool = False,
    v1_headers: list[str] | None = None,
) -> FetchOptions:
    """Return the fetch options that the command line asks for.

    Raises `typer.BadParameter` for a combination that `FetchOptions` refuses.
    """
    try:
        return FetchOptions(
            page_size_hint=page_size_hint,
            stream=stream,
            filters=pairs(filters, "--filter"),
            event_types=event_types or (),
            skip_event_types=skip_event_types or (),
            v1_headers=v1_headers or (),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
