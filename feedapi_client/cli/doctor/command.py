"""The command ``feedapi doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from feedapi_client.cli.common.options import AuthEnv, CaFile, HeaderEnv, Json, Url, V1Partitions
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.doctor import bounds

if TYPE_CHECKING:
    from feedapi_client.cli.doctor.bounds import Bounds
    from feedapi_client.cli.doctor.evidence import Evidence
    from feedapi_client.cli.doctor.prober import Prober

_MEBIBYTE = bounds.KIB * bounds.KIB

Partitions = Annotated[
    list[int] | None,
    typer.Option(
        "--partition",
        "-p",
        min=0,
        max=32767,
        metavar="ID",
        help=f"Read this partition, in place of {bounds.SAMPLED_PARTITIONS} of all kinds. "
        "Repeatable.",
    ),
]
MaxRequests = Annotated[
    int, typer.Option("--max-requests", min=1, metavar="N", help="Requests in total.")
]
MaxBytes = Annotated[
    int, typer.Option("--max-bytes", min=1024, metavar="N", help="Bytes received in total.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Time for one request.")
]
Ignored = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="CHECK", help="Leave out this check. Repeatable."),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with code 1 for every finding, not only for a MUST.")
]
All = Annotated[bool, typer.Option("--all", help="Show the checks that passed, too.")]


def doctor(
    url: Url,
    json: Json = False,
    show_all: All = False,
    strict: Strict = False,
    ignored: Ignored = None,
    partitions: Partitions = None,
    v1_partitions: V1Partitions = None,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    ca_file: CaFile = None,
    max_requests: MaxRequests = bounds.MAX_REQUESTS,
    max_bytes: MaxBytes = bounds.MAX_BYTES,
    timeout: Timeout = bounds.TIMEOUT,
) -> None:
    """Check a publisher: is this a sound FeedAPI feed? Each finding says what it costs a consumer.

    Asks for each MUST and SHOULD of the specification, and for the deviations that publishers in
    the field have. It only reads, one request after the other, and stops at 120 requests or 32 MiB,
    1 MiB of each page. The exit code is 0 for a sound feed, 1 where a MUST is violated, 69 where
    the feed can't be reached.
    """
    from feedapi_client.cli.common.feed_url import checked_url
    from feedapi_client.cli.common.http_client import headers_from_environment
    from feedapi_client.cli.doctor.bounds import Bounds
    from feedapi_client.cli.doctor.report import as_json, check_all, print_report

    _check_ids(ignored or [])
    headers = headers_from_environment(auth_env, header_env)
    limits = Bounds(max_requests=max_requests, max_bytes=max_bytes, timeout=timeout)
    prober, evidence = run_async(
        _examine, checked_url(url), headers, ca_file, limits, v1_partitions, partitions or []
    )
    report = check_all(evidence, prober, ignored or [])
    if json:
        from feedapi_client.cli.common.json_output import print_json

        print_json(as_json(report))
    else:
        print_report(report, verbose=show_all)
    raise typer.Exit(report.exit_code(strict=strict))


def _check_ids(ids: list[str]) -> None:
    from feedapi_client.cli.doctor.checks.table import CHECKS

    unknown = sorted(set(ids) - {check.id for check in CHECKS})
    if unknown:
        raise typer.BadParameter(f"--ignore: there is no check {unknown[0]}")


async def _examine(
    url: str,
    headers: dict[str, str],
    ca_file: str | None,
    limits: Bounds,
    v1_partitions: int | None,
    partitions: list[int],
) -> tuple[Prober, Evidence]:
    """Examine the feed. Raises `UnreachableError` when nobody answers that can be examined."""
    from contextlib import AsyncExitStack

    from feedapi_client import Limits
    from feedapi_client.cli.common.http_client import http_client
    from feedapi_client.cli.doctor.examination import Examination
    from feedapi_client.cli.doctor.prober import Prober
    from feedapi_client.cli.doctor.reach import check_reached, without_credentials
    from feedapi_client.http.transport import Transport

    async with AsyncExitStack() as stack:

        async def transport(url: str, headers: dict[str, str]) -> Transport:
            client = await stack.enter_async_context(http_client(headers, Limits(), ca_file))
            opened = Transport(url, http=client)
            stack.push_async_callback(opened.aclose)
            return opened

        plain = without_credentials(url)
        known = bool(headers) or plain != url
        anonymous = await transport(plain, {}) if known else None
        prober = Prober(await transport(url, headers), anonymous, limits, headers.values())
        examination = Examination(prober, v1_partitions=v1_partitions, only=partitions)
        evidence = await examination.run()
    check_reached(evidence)
    return prober, evidence
