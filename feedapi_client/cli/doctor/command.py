"""The command ``feedapi doctor``: its options, and what it prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from feedapi_client.cli import options
from feedapi_client.cli.command import (
    FAILURE,
    UNREACHABLE,
    USAGE,
    CommandError,
    command,
    flag,
    option,
)
from feedapi_client.cli.terminal import print_json, print_line, print_table
from feedapi_client.protocol.text import counted

if TYPE_CHECKING:
    from feedapi_client.cli.doctor.examination import Examination
    from feedapi_client.cli.doctor.feed_checks import Check, Finding, Section

_LEVELS = ("MUST", "SHOULD", "deviation")
_ROWS = 5
"""Of one check in the table."""


@command(
    "doctor https://service/myfeed",
    "doctor https://service/myfeed --auth-env TOKEN --json",
    "doctor https://service/myfeed --strict --ignore id-text",
)
async def doctor(
    *,
    asked: options.AskedFeed,
    json: bool = options.as_json(),
    strict: bool = flag("Exit with code 1 for every finding, not only for a MUST."),
    ignored: list[str] | None = option(
        "CHECK", "Leave out this check. Repeatable.", flags="--ignore"
    ),
    max_requests: int = option("N", "Requests in total.", default=120, min=1),
    timeout: float = option("SECONDS", "Time for one request.", default=10.0, min=0.1),
) -> int:
    """Check a publisher: is this a sound FeedAPI feed? Each finding says what it costs a consumer.

    Asks for each MUST and SHOULD of the specification, and for the deviations that publishers in
    the field have. It only reads, one request after the other, and stops at 120 requests or 32 MiB,
    1 MiB of each page. The exit code is 0 for a sound feed, 1 where a MUST is violated, 69 where
    the feed can't be reached.
    """
    from feedapi_client.cli.doctor.examination import Examination
    from feedapi_client.cli.doctor.prober import Bounds, Prober

    checks = {check.id: check for section in sections() for check in section}
    for id in ignored or ():
        if checks.pop(id, None) is None:
            part = "".join(f": it is a part of {now}" for now in checks if id in checks[now].was)
            raise CommandError(f"--ignore: there is no check {id}{part}", USAGE)
    bounds = Bounds(max_requests=max_requests, timeout=timeout)
    connect: Any = asked.connection.client
    async with connect(own=False) as client, connect(own=False, anonymous=True) as anonymous:
        e = Examination(Prober(asked.url, client, anonymous, bounds), asked.v1_partitions)
        await e.run()
    _check_reached(e)
    results = [_result(check, e) for check in checks.values()]
    if json:
        print_json(_as_json(e, results))
    else:
        _print(e, results)
    found = {result.level for result in results if result.findings}
    return FAILURE if "MUST" in found or (strict and found) else 0


def sections() -> tuple[Section, ...]:
    from feedapi_client.cli.doctor import feed_checks, page_checks, request_checks

    feed = (feed_checks.DISCOVERY, feed_checks.LINEAGE, request_checks.RESPONSES)
    return (*feed, page_checks.PAGES, page_checks.AGAIN, request_checks.ARGUMENTS)


def _check_reached(e: Examination) -> None:
    from feedapi_client.cli.doctor.prober import Problem

    answer, code, text = e.discoveries[0].answer, UNREACHABLE, ""
    if e.wrong_count:  # no fault of the publisher
        code, text = USAGE, f"--v1-partitions is not the number of its partitions: {e.wrong_count}."
        text += " Give the number that its publisher documents"
    elif answer.status in (401, 403):
        text = f"{answer}. Give credentials with --auth-env or --header-env"
    elif answer.may_pass and answer.problem is not Problem.BROKEN:
        text = str(answer)
    elif answer.status == 400 and e.info is None:
        text = f"{answer}. That is how a ZeroEventHub (v1) feed answers discovery: give "
        text += "--v1-partitions, the number of partitions that its publisher documents"
    if text:
        raise CommandError(f"feed {e.prober.feed}: {text}", code)


@dataclass(frozen=True, slots=True)
class _Result:
    check: Check
    findings: list[Finding]
    not_checked: str | None = None

    @property
    def level(self) -> str:
        levels = [finding.level or self.check.level for finding in self.findings]
        return min(levels, key=_LEVELS.index, default=self.check.level)

    @property
    def outcome(self) -> str:
        return "found" if self.findings else "not checked" if self.not_checked else "passed"


def _result(check: Check, e: Examination) -> _Result:
    if missing := next(filter(None, (need(e) for need in check.needs)), None):
        return _Result(check, [], missing)
    found = dict.fromkeys(check.find(e))
    return _Result(check, [replace(f, text=f.text + e.prober.hide(f.said)) for f in found])


def _as_json(e: Examination, results: list[_Result]) -> dict[str, Any]:
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


def _print(e: Examination, results: list[_Result]) -> None:
    print_line(e.prober.feed)
    dialect = "unknown" if e.info is None else e.info.dialect
    read = f"{counted(len(e.partitions), 'partition')}, {len(e.visits)} read"
    requests, size = counted(e.prober.requests, "request"), counted(e.prober.bytes, "byte")
    print_line(f"dialect {dialect} · {read} · {requests}, {size}")
    found = [result for result in results if result.findings]
    if found:
        rows = [row for result in found for row in _rows(result)]
        print_table(("check", "level", "partitions", "result"), rows)
    for result in found:
        check, rules = result.check, f"; rules {', '.join(result.check.rules)}"
        print_line(check.id)
        for line in (
            f"required: {check.requirement}",
            f"costs: {check.cost}",
            f"see: {check.source}{rules if check.rules else ''}; doctor.md#{check.id}",
        ):
            print_line(line.replace("`", ""), indent="  ")
    violated = sum(result.level == "MUST" for result in found)
    verdict = f"{violated} violated" if violated else "sound"
    others = len(found) - violated
    extra = f", {counted(others, 'other finding')}" if others else ""
    outcomes = [result.outcome for result in results]
    passed, skipped = outcomes.count("passed"), outcomes.count("not checked")
    text = f"{counted(passed, 'check')} passed, {skipped} not applicable or not done"
    print_line(f"{verdict}{extra}: {text}")


def _rows(result: _Result) -> Iterator[list[str]]:
    """Yield what the table says of a check: partitions of which it says the same are a row."""
    texts = dict[str, list[str]]()
    for each in result.findings:
        partitions = texts.setdefault(each.text, [])
        partitions += [] if each.partition is None else [str(each.partition)]
    rows = [(", ".join(partitions), text) for text, partitions in texts.items()]
    if len(rows) > _ROWS:
        rows[_ROWS:] = [("", f"{len(rows) - _ROWS} more (--json lists them)")]
    for row in rows:
        yield [result.check.id, result.level, *row]
