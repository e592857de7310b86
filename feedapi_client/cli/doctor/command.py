"""The command ``feedapi doctor``: its options, and what it prints."""

from __future__ import annotations

from collections.abc import Iterator
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
    from feedapi_client.cli.doctor.checks import Check, Section
    from feedapi_client.cli.doctor.examination import Examination

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
    judged = [_judged(check, e) for check in checks.values()]
    found = {each["level"] for each in judged if each["findings"]}
    examined: dict[str, Any] = {
        "feed": e.prober.feed,
        "dialect": None if e.info is None else e.info.dialect,
        "sound": "MUST" not in found,
        "partitions": len(e.partitions),
        "partitions_read": list(e.visits),
        "requests": e.prober.requests,
        "bytes": e.prober.bytes,
        "checks": judged,
    }
    if json:
        print_json(examined)
    else:
        _print(**examined)
    return FAILURE if "MUST" in found or (strict and found) else 0


def sections() -> tuple[Section, ...]:
    from feedapi_client.cli.doctor.checks import SECTIONS

    return SECTIONS


def _check_reached(e: Examination) -> None:
    from feedapi_client.cli.doctor.prober import Problem

    answer, code, text = e.discoveries[0], UNREACHABLE, ""
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


def _judged(check: Check, e: Examination) -> dict[str, Any]:
    missing = next(filter(None, (need(e) for need in check.needs)), None)
    found = dict.fromkeys(() if missing else check.find(e))
    levels = [finding.level or check.level for finding in found]
    return {
        "id": check.id,
        "level": min(levels, key=_LEVELS.index, default=check.level),
        "outcome": "found" if found else "not checked" if missing else "passed",
        "not_checked": missing,
        "findings": [
            {"partition": each.partition, "text": each.text + e.prober.hide(each.said)}
            for each in found
        ],
        "requirement": check.requirement,
        "cost": check.cost,
        "source": check.source,
        "rules": check.rules,
        "documentation": f"doctor.md#{check.id}",
    }


def _print(*, feed: str, dialect: str | None, checks: list[dict[str, Any]], **of: Any) -> None:
    print_line(feed)
    read = f"{counted(of['partitions'], 'partition')}, {len(of['partitions_read'])} read"
    requests, size = counted(of["requests"], "request"), counted(of["bytes"], "byte")
    print_line(f"dialect {dialect or 'unknown'} · {read} · {requests}, {size}")
    found = [each for each in checks if each["findings"]]
    if found:
        rows = [row for each in found for row in _rows(each)]
        print_table(("check", "level", "partitions", "result"), rows)
    for each in found:
        rules = f"; rules {', '.join(each['rules'])}" if each["rules"] else ""
        print_line(each["id"])
        for line in (
            f"required: {each['requirement']}",
            f"costs: {each['cost']}",
            f"see: {each['source']}{rules}; {each['documentation']}",
        ):
            print_line(line.replace("`", ""), indent="  ")
    violated = sum(each["level"] == "MUST" for each in found)
    verdict = f"{violated} violated" if violated else "sound"
    others = len(found) - violated
    extra = f", {counted(others, 'other finding')}" if others else ""
    outcomes = [each["outcome"] for each in checks]
    passed, skipped = outcomes.count("passed"), outcomes.count("not checked")
    text = f"{counted(passed, 'check')} passed, {skipped} not applicable or not done"
    print_line(f"{verdict}{extra}: {text}")


def _rows(judged: dict[str, Any]) -> Iterator[list[str]]:
    texts = dict[str, list[str]]()
    for each in judged["findings"]:
        partitions = texts.setdefault(each["text"], [])
        partitions += [] if each["partition"] is None else [str(each["partition"])]
    rows = [(", ".join(partitions), text) for text, partitions in texts.items()]
    if len(rows) > _ROWS:
        rows[_ROWS:] = [("", f"{len(rows) - _ROWS} more (--json lists them)")]
    for row in rows:
        yield [judged["id"], judged["level"], *row]
