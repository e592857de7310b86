"""The command ``feedapi doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from feedapi_client.cli.command import UNREACHABLE, USAGE, CommandError, command, option, run_async
from feedapi_client.cli.doctor import bounds
from feedapi_client.cli.options import AskedFeed

if TYPE_CHECKING:
    from feedapi_client.cli.doctor.evidence import FeedEvidence
    from feedapi_client.cli.doctor.prober import Prober


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Options of ``feedapi doctor``."""

    asked: AskedFeed
    json: bool = option(help="Print JSON.", default=False)
    show_all: bool = option(help="Show the checks that passed, too.", default=False, flags="--all")
    strict: bool = option(
        help="Exit with code 1 for every finding, not only for a MUST.", default=False
    )
    ignored: list[str] | None = option(
        "CHECK", "Leave out this check. Repeatable.", flags="--ignore"
    )
    partitions: list[int] | None = option(
        "ID",
        f"Read this partition, in place of {bounds.SAMPLED_PARTITIONS} of all kinds. Repeatable.",
        flags="--partition -p",
        min=0,
        max=32767,
    )
    max_requests: int = option("N", "Requests in total.", default=bounds.MAX_REQUESTS, min=1)
    timeout: float = option("SECONDS", "Time for one request.", default=bounds.TIMEOUT, min=0.1)


@command(
    "doctor https://service/myfeed",
    "doctor https://service/myfeed --auth-env TOKEN --json",
    "doctor https://service/myfeed --strict --ignore lineage-string",
)
def doctor(options: Doctor) -> int:
    """Check a publisher: is this a sound FeedAPI feed? Each finding says what it costs a consumer.

    Asks for each MUST and SHOULD of the specification, and for the deviations that publishers in
    the field have. It only reads, one request after the other, and stops at 120 requests or 32 MiB,
    1 MiB of each page. The exit code is 0 for a sound feed, 1 where a MUST is violated, 69 where
    the feed can't be reached.
    """
    from feedapi_client.cli.doctor.report import as_json, check_all, print_report

    _check_ids(options.ignored or [])
    prober, evidence = run_async(_examine, options)
    report = check_all(evidence, prober, options.ignored or [])
    if options.json:
        from feedapi_client.cli.terminal import print_json

        print_json(as_json(report))
    else:
        print_report(report, verbose=options.show_all)
    return report.exit_code(strict=options.strict)


def _check_ids(ids: list[str]) -> None:
    from feedapi_client.cli.doctor.report import CHECKS

    unknown = sorted(set(ids) - {check.id for check in CHECKS})
    if unknown:
        raise typer.BadParameter(f"--ignore: there is no check {unknown[0]}")


async def _examine(options: Doctor) -> tuple[Prober, FeedEvidence]:
    """Examine the feed. Raises `CommandError` when nobody answers that can be examined."""
    from contextlib import AsyncExitStack

    from feedapi_client.cli.doctor.bounds import Bounds
    from feedapi_client.cli.doctor.examination import Examination
    from feedapi_client.cli.doctor.prober import Prober
    from feedapi_client.http.endpoint import Endpoint
    from feedapi_client.http.io import AsyncIO

    async with AsyncExitStack() as stack:

        async def transport(url: str, *, anonymous: bool = False) -> Endpoint:
            client = options.asked.connection.client(anonymous=anonymous)
            io = AsyncIO(url, await stack.enter_async_context(client))
            stack.push_async_callback(io.aclose)
            return Endpoint(url, io)

        url, headers = options.asked.url, options.asked.connection.headers()
        plain = _without_credentials(url)
        known = bool(headers) or plain != url
        prober = Prober(
            await transport(url),
            await transport(plain, anonymous=True) if known else None,
            Bounds(max_requests=options.max_requests, timeout=options.timeout),
            headers.values(),
        )
        examination = Examination(
            prober, v1_partitions=options.asked.v1_partitions, only=options.partitions or []
        )
        evidence = await examination.run()
    _check_reached(evidence)
    return prober, evidence


def _without_credentials(url: str) -> str:
    """Return the URL without user and password."""
    from urllib.parse import urlsplit, urlunsplit

    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _check_reached(evidence: FeedEvidence) -> None:
    """Raise `CommandError` unless the first discovery says something about the publisher.

    Raises `CommandError` for a wrong number of partitions, which is no fault of the publisher.
    """
    from feedapi_client.cli.doctor.probe_messages import ProbeProblem

    if evidence.wrong_count:
        raise CommandError(
            f"feed {evidence.feed}: --v1-partitions is not the number of its partitions: "
            f"{evidence.wrong_count}. Give the number that its publisher documents",
            USAGE,
        )
    found = evidence.first
    if found is None:
        raise CommandError(f"feed {evidence.feed}: nothing could be asked", UNREACHABLE)
    answer = found.answer
    if answer.status in (401, 403):
        raise CommandError(
            f"feed {evidence.feed}: {answer}. Give credentials with --auth-env or --header-env",
            UNREACHABLE,
        )
    if answer.may_pass and answer.problem is not ProbeProblem.BROKEN:
        raise CommandError(f"feed {evidence.feed}: {answer}", UNREACHABLE)
    if answer.status == 400 and found.info is None:
        raise CommandError(
            f"feed {evidence.feed}: {answer}. That is how a ZeroEventHub (v1) feed answers "
            "discovery: give --v1-partitions, the number of partitions that its publisher "
            "documents",
            UNREACHABLE,
        )
