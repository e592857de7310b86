"""The command ``feedapi doctor``: its options, and what it prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feedapi_client.cli.doctor import Bounds
from feedapi_client.cli.exit_codes import FAILURE
from feedapi_client.cli.feed_options import (
    Connection,
    Json,
    OnlyPartitions,
    Url,
    V1Partitions,
    checked_url,
)
from feedapi_client.cli.reporting import UnreachableError, UsageError, run_async

if TYPE_CHECKING:
    from feedapi_client.cli.doctor.examination import Examination
    from feedapi_client.cli.doctor.feed_checks import Check, Finding, Section
    from feedapi_client.cli.terminal import Cell

_STYLES = {"MUST": "bold red", "SHOULD": "yellow", "deviation": "yellow"}
_ROWS = 5
"""Of one check in the table."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Options of ``feedapi doctor``."""

    url: Url
    json: Json = False
    show_all: Annotated[bool, typer.Option("--all", help="Show the checks that passed, too.")] = (
        False
    )
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit with code 1 for every finding, not only for a MUST."),
    ] = False
    ignored: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CHECK", help="Leave out this check. Repeatable."),
    ] = None
    partitions: OnlyPartitions = None
    v1_partitions: V1Partitions = None
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, metavar="N", help="Requests in total.")
    ] = Bounds().max_requests
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Time for one request.")
    ] = Bounds().timeout
    connection: Connection


def doctor(options: Doctor) -> int:
    """Check a publisher: is this a sound FeedAPI feed? Each finding says what it costs a consumer.

    Asks for each MUST and SHOULD of the specification, and for the deviations that publishers in
    the field have. It only reads, one request after the other, and stops at 120 requests or 32 MiB,
    1 MiB of each page. The exit code is 0 for a sound feed, 1 where a MUST is violated, 69 where
    the feed can't be reached.
    """
    checks = {check.id: check for section in sections() for check in section}
    for id in options.ignored or ():
        if checks.pop(id, None) is None:
            part = "".join(f": it is a part of {now}" for now in checks if id in checks[now].was)
            raise typer.BadParameter(f"--ignore: there is no check {id}{part}")
    checked_url(options.url)
    options.connection.check()
    e = run_async(_examine, options)
    _check_reached(e)
    results = [_result(check, e) for check in checks.values()]
    found = {result.level for result in results if result.findings}
    if options.json:
        from feedapi_client.cli.escape import print_json

        print_json(_as_json(e, results))
    else:
        _print(e, results, verbose=options.show_all)
    return FAILURE if "MUST" in found or (options.strict and found) else 0


def sections() -> tuple[Section, ...]:
    """Return all checks, in the order of the report."""
    from feedapi_client.cli.doctor import feed_checks, page_checks, request_checks

    feed = (feed_checks.DISCOVERY, feed_checks.LINEAGE, request_checks.RESPONSES)
    return (*feed, page_checks.PAGES, page_checks.AGAIN, request_checks.ARGUMENTS)


async def _examine(options: Doctor) -> Examination:
    from feedapi_client.cli import doctor
    from feedapi_client.cli.doctor.examination import Examination
    from feedapi_client.cli.doctor.prober import Prober

    connection = options.connection
    bounds = doctor.Bounds(max_requests=options.max_requests, timeout=options.timeout)
    async with (
        connection.client(own=False) as client,
        connection.client(own=False, anonymous=True) as anonymous,
    ):
        assert client is not None
        assert anonymous is not None
        prober = Prober(options.url, client, anonymous, bounds)
        only = options.partitions or ()
        e = Examination(prober, v1_partitions=options.v1_partitions, only=only)
        await e.run()
    return e


def _check_reached(e: Examination) -> None:
    """Raise an error unless the first discovery says something about the publisher."""
    from feedapi_client.cli.doctor.prober import Problem

    feed = f"feed {e.prober.feed}"
    if e.wrong_count:  # no fault of the publisher
        raise UsageError(
            f"{feed}: --v1-partitions is not the number of its partitions: {e.wrong_count}. Give "
            "the number that its publisher documents"
        )
    if not e.discoveries:
        raise UnreachableError(f"{feed}: nothing could be asked")
    answer = e.discoveries[0].answer
    if answer.status in (401, 403):
        way = "Give credentials with --auth-env or --header-env"
        raise UnreachableError(f"{feed}: {answer}. {way}")
    if answer.may_pass and answer.problem is not Problem.BROKEN:
        raise UnreachableError(f"{feed}: {answer}")
    if answer.status == 400 and e.info is None:
        raise UnreachableError(
            f"{feed}: {answer}. That is how a ZeroEventHub (v1) feed answers discovery: give "
            "--v1-partitions, the number of partitions that its publisher documents"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What one check came to: what was found, or why it was not done."""

    check: Check
    findings: list[Finding]
    not_checked: str | None = None

    @property
    def level(self) -> str:
        """How binding what was found is."""
        levels = [finding.level or self.check.level for finding in self.findings]
        return min(levels, key=list(_STYLES).index, default=self.check.level)

    @property
    def outcome(self) -> str:
        """The outcome in one word or two."""
        return "found" if self.findings else "not checked" if self.not_checked else "passed"


def _result(check: Check, e: Examination) -> Result:
    missing = next(filter(None, (need(e) for need in check.needs)), None)
    found = [] if missing else dict.fromkeys(check.find(e))
    return Result(check, [replace(each, text=e.prober.hide(each.text)) for each in found], missing)


def _as_json(e: Examination, results: list[Result]) -> dict[str, Any]:
    return {
        "feed": e.prober.feed,
        "dialect": None if e.info is None else e.info.dialect,
        "sound": not any(each.findings and each.level == "MUST" for each in results),
        "partitions": len(e.partitions),
        "partitions_read": list(e.visits),
        "requests": e.prober.requests,
        "bytes": e.prober.bytes,
        "checks": [
            {
                "id": result.check.id,
                "level": result.level,
                "outcome": result.outcome,
                "not_checked": result.not_checked,
                "findings": [{"partition": f.partition, "text": f.text} for f in result.findings],
                "requirement": result.check.requirement,
                "cost": result.check.cost,
                "source": result.check.source,
                "rules": result.check.rules,
                "documentation": f"doctor.md#{result.check.id}",
            }
            for result in results
        ],
    }


def _print(e: Examination, results: list[Result], *, verbose: bool) -> None:
    """Print the findings, or with `verbose` all checks, and a summary."""
    from feedapi_client.cli.terminal import console, plain_line, print_table

    def write(text: str, style: str = "", indent: str = "") -> None:
        console().print(indent, plain_line(text, style), sep="")

    write(e.prober.feed, "bold")
    dialect = "unknown" if e.info is None else e.info.dialect
    read = f"{len(e.partitions)} partitions, {len(e.visits)} of them read"
    write(f"dialect {dialect} · {read} · {e.prober.requests} requests, {e.prober.bytes:,} bytes")
    rows = [row for each in results if each.findings or verbose for row in _rows(each)]
    if rows:
        print_table(("check", "level", "partitions", "result"), rows)
    found = [result for result in results if result.findings]
    for result in found:
        check = result.check
        rules = f"; rules {', '.join(check.rules)}" if check.rules else ""
        write(check.id, _STYLES[result.level])
        for line in (
            f"required: {check.requirement}",
            f"costs: {check.cost}",
            f"see: {check.source}{rules}; doctor.md#{check.id}",
        ):
            write(line.replace("`", ""), indent="  ")
    violated = sum(result.level == "MUST" for result in found)
    verdict = f"{violated} violated" if violated else "sound"
    extra = f", {len(found) - violated} other findings" if len(found) > violated else ""
    outcomes = [result.outcome for result in results]
    passed, skipped = outcomes.count("passed"), outcomes.count("not checked")
    summary = f"{passed} checks passed, {skipped} not applicable or not done (--all says why)"
    write(f"{verdict}{extra}: {summary}", "bold red" if violated else "bold green")


def _rows(result: Result) -> Iterator[list[Cell]]:
    """Return what the table says of a check: partitions of which it says the same are a row."""
    head: list[Cell] = [(result.check.id, _STYLES[result.level]), result.level]
    if not result.findings:
        yield [(result.check.id, "dim"), result.level, "", result.not_checked or "passed"]
    texts: dict[str, list[int | None]] = {}
    for each in result.findings:
        texts.setdefault(each.text, []).append(each.partition)
    for text, partitions in list(texts.items())[:_ROWS]:
        yield [*head, ", ".join(str(id) for id in partitions if id is not None), text]
    if len(texts) > _ROWS:
        yield [*head, "", f"{len(texts) - _ROWS} more (--json lists them)"]
