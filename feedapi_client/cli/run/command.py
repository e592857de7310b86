"""The command ``feedapi run``."""

from __future__ import annotations

import sys

import typer

from feedapi_client.cli.common.monitoring import Monitor
from feedapi_client.cli.common.options import (
    AuthEnv,
    CaFile,
    EventTypes,
    Filters,
    HeaderEnv,
    Lineage,
    SkipEventTypes,
    Url,
    V1Partitions,
    edges,
)
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.run.options import (
    Attempts,
    Follow,
    Grace,
    HandlerPath,
    LogFormat,
    LogFormatOption,
    MaxConcurrency,
    Name,
    OnFailure,
    OnFailureOption,
    Park,
    Shared,
    Start,
    StartOption,
    Store,
    Workers,
)


def run(
    url: Url,
    handler: HandlerPath,
    store: Store,
    name: Name = "default",
    on_failure: OnFailureOption = OnFailure.RAISE,
    attempts: Attempts = 5,
    share: Shared = False,
    workers: Workers = 1,
    monitor: Monitor = None,
    grace: Grace = 25.0,
    max_concurrency: MaxConcurrency = 32,
    start: StartOption = Start.FIRST,
    follow: Follow = True,
    park: Park = False,
    event_types: EventTypes = None,
    skip_event_types: SkipEventTypes = None,
    filters: Filters = None,
    v1_partitions: V1Partitions = None,
    lineage: Lineage = None,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    ca_file: CaFile = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Consume a feed with the application's handler: the library without a main program.

    SIGTERM and Ctrl-C end it after what is in flight, a second signal cancels that, a third ends
    at once. SIGHUP imports the handler's package anew, and goes on with it from the committed
    cursors; if that fails the old handler stays.
    """
    from feedapi_client.cli.common.feed_url import checked_url
    from feedapi_client.cli.common.fetch_options import fetch_options
    from feedapi_client.cli.common.http_client import headers_from_environment
    from feedapi_client.cli.run.logs import log_to_stderr
    from feedapi_client.cli.run.runner import RunSettings, run_handler
    from feedapi_client.cli.run.workers import (
        end_with_parent,
        monitor_of,
        run_workers,
        worker_number,
    )

    if not name:
        raise typer.BadParameter("--name must not be empty")
    worker = worker_number()
    if worker is None and workers > 1:
        if sys.platform == "win32":
            raise typer.BadParameter("--workers needs signals that Windows does not have")
        raise typer.Exit(run_async(run_workers, workers))
    if worker is not None:
        end_with_parent()
    settings = RunSettings(
        url=checked_url(url),
        handler=handler,
        store=store,
        name=name,
        on_failure=on_failure,
        attempts=attempts or None,
        share=share or worker is not None,
        monitor=monitor_of(monitor, worker or 0),
        grace=grace,
        max_concurrency=max_concurrency,
        start=start.value,
        follow=follow,
        park=park,
        fetch=fetch_options(filters, event_types, skip_event_types),
        v1_partitions=v1_partitions,
        lineage=edges(lineage),
        headers=headers_from_environment(auth_env, header_env),
        ca_file=ca_file,
    )
    log_to_stderr(log_format)
    raise typer.Exit(run_async(run_handler, settings))
