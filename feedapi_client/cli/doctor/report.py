"""What the checks come to: results, their JSON, and how they are printed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from feedapi_client.cli.command import FAILURE
from feedapi_client.cli.doctor import (
    argument_checks,
    discovery_checks,
    http_checks,
    lineage_checks,
    page_checks,
    resumption_checks,
)
from feedapi_client.cli.doctor.check import Check, Finding, Level
from feedapi_client.cli.doctor.evidence import FeedEvidence
from feedapi_client.cli.doctor.prober import Prober

SECTIONS = (
    discovery_checks.SECTION,
    lineage_checks.SECTION,
    http_checks.SECTION,
    page_checks.SECTION,
    resumption_checks.SECTION,
    argument_checks.SECTION,
)
CHECKS: tuple[Check, ...] = tuple(check for section in SECTIONS for check in section.checks)

_FINDINGS_SHOWN = 5
_STYLES = {Level.MUST: "bold red", Level.SHOULD: "yellow", Level.DEVIATION: "yellow"}


@dataclass(frozen=True, slots=True)
class Result:
    """What one check came to. `not_checked` says why it was not done."""

    check: Check
    findings: tuple[Finding, ...] = ()
    not_checked: str | None = None

    @property
    def outcome(self) -> str:
        """The outcome in one word or two."""
        if self.not_checked is not None:
            return "not checked"
        return "found" if self.findings else "passed"


@dataclass(frozen=True, slots=True)
class ExaminationReport:
    """The results of all checks, and what the examination cost."""

    evidence: FeedEvidence
    results: tuple[Result, ...]
    requests: int
    bytes: int

    def findings_of(self, *levels: Level) -> list[Result]:
        """Return the results with findings, of these levels."""
        return [each for each in self.results if each.findings and each.check.level in levels]

    def exit_code(self, *, strict: bool) -> int:
        """Return 1 where a MUST is violated; with `strict` for any finding."""
        counted = tuple(Level) if strict else (Level.MUST,)
        return FAILURE if self.findings_of(*counted) else 0


def check_all(
    evidence: FeedEvidence, prober: Prober, ignored: Collection[str]
) -> ExaminationReport:
    """Do the checks, without the `ignored` ones."""
    results = tuple(_check(check, evidence, prober) for check in CHECKS if check.id not in ignored)
    return ExaminationReport(evidence, results, prober.requests, prober.bytes)


def _check(check: Check, evidence: FeedEvidence, prober: Prober) -> Result:
    missing = check.missing(evidence)
    if missing is not None:
        return Result(check, not_checked=missing)
    found = (replace(each, text=prober.hide(each.text)) for each in check.find(evidence))
    return Result(check, tuple(found))


def as_json(report: ExaminationReport) -> dict[str, Any]:
    """Return a report as JSON."""
    evidence = report.evidence
    return {
        "feed": evidence.feed,
        "dialect": evidence.dialect,
        "sound": not report.findings_of(Level.MUST),
        "partitions": len(evidence.partitions),
        "partitions_read": list(evidence.visits),
        "requests": report.requests,
        "bytes": report.bytes,
        "checks": [_result_as_json(result) for result in report.results],
    }


def _result_as_json(result: Result) -> dict[str, Any]:
    check = result.check
    return {
        "id": check.id,
        "level": check.level.value,
        "outcome": result.outcome,
        "not_checked": result.not_checked,
        "findings": [{"partition": each.partition, "text": each.text} for each in result.findings],
        "requirement": check.requirement,
        "cost": check.cost,
        "source": check.source,
        "rules": list(check.rules),
        "documentation": f"doctor.md#{check.id}",
    }


def print_report(report: ExaminationReport, *, verbose: bool) -> None:
    """Print the findings, or with `verbose` all checks, and a summary."""
    from feedapi_client.cli.terminal import print_line

    evidence = report.evidence
    print_line(evidence.feed, "bold")
    print_line(
        f"dialect {evidence.dialect or 'unknown'} · {len(evidence.partitions)} partitions, "
        f"{len(evidence.visits)} of them read · {report.requests} requests, "
        f"{report.bytes:,} bytes"
    )
    shown = [each for each in report.results if each.findings or verbose]
    if shown:
        _print_table(shown)
    for result in report.results:
        if result.findings:
            _print_explanation(result)
    _print_summary(report)


def _print_table(results: list[Result]) -> None:
    from feedapi_client.cli.terminal import Cell, print_table

    rows: list[list[Cell]] = []
    for result in results:
        level = result.check.level
        head: list[Cell] = [
            (result.check.id, _STYLES[level] if result.findings else "dim"),
            level.value,
        ]
        if not result.findings:
            rows.append([*head, "", result.not_checked or ("passed", "green")])
        for finding in result.findings[:_FINDINGS_SHOWN]:
            partition = "" if finding.partition is None else str(finding.partition)
            rows.append([*head, partition, finding.text])
        if (more := len(result.findings) - _FINDINGS_SHOWN) > 0:
            rows.append([*head, "", f"{more} more (--json lists them)"])
    print_table(("check", "level", "partition", "result"), rows)


def _print_explanation(result: Result) -> None:
    from feedapi_client.cli.terminal import print_line

    check = result.check
    rules = f"; rules {', '.join(check.rules)}" if check.rules else ""
    print_line(check.id, _STYLES[check.level])
    for line in (
        f"required: {_words(check.requirement)}",
        f"costs: {_words(check.cost)}",
        f"see: {check.source}{rules}; doctor.md#{check.id}",
    ):
        print_line(f"  {line}")


def _words(text: str) -> str:
    return text.replace("`", "")


def _print_summary(report: ExaminationReport) -> None:
    from feedapi_client.cli.terminal import print_line

    violations = len(report.findings_of(Level.MUST))
    others = len(report.findings_of(Level.SHOULD, Level.DEVIATION))
    passed = sum(each.outcome == "passed" for each in report.results)
    skipped = sum(each.outcome == "not checked" for each in report.results)
    verdict = f"{violations} violated" if violations else "sound"
    extra = f", {others} other findings" if others else ""
    print_line(
        f"{verdict}{extra}: {passed} checks passed, {skipped} not applicable or not done "
        "(--all says why)",
        "bold red" if violations else "bold green",
    )
