"""Prometheus' `promtool` on series as a consumer exports them (``apt-get install prometheus``)."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests import components

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""The value of each series, by its name and labels."""


def parsed(exported: str, **target: str) -> Series:
    """Return the series of one scrape, with the labels of its target added."""
    return {
        (sample.name, tuple(sorted({**sample.labels, **target}.items()))): sample.value
        for family in text_string_to_metric_families(exported)
        for sample in family.samples
        if sample.name.startswith(("feedapi", "messaging"))
    }


def history(*scrapes: tuple[int, Series]) -> list[dict[str, str]]:
    """Return the input of a test: each scrape repeated for so many minutes, one after the other."""
    names = {each for _, series in scrapes for each in series}
    return [
        {
            "series": f"{name}{{{','.join(f'{key}={_quoted(value)}' for key, value in labels)}}}",
            "values": " ".join(
                str(series.get((name, labels), "_"))
                for minutes, series in scrapes
                for _ in range(minutes)
            ),
        }
        for name, labels in sorted(names)
    ]


def changed(series: Series, name: str, value: float, **labels: str) -> Series:
    """Return the series with another value of those of this name and these labels."""
    wanted = labels.items()
    keys = [key for key in series if key[0] == name and wanted <= dict(key[1]).items()]
    assert keys, f"{name} {labels} is not exported"
    return {**series, **dict.fromkeys(keys, value)}


def check(
    folder: Path,
    rules: Path,
    series: Sequence[Mapping[str, str]],
    expected: Sequence[tuple[int, str, bool]],
    alerts: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Run a test of promtool. `expected`: whether an expression has a value after so many minutes.

    Fails with what promtool says.
    """
    expressions = [
        {
            "expr": f"group({expression})",
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": "{}", "value": 1}] if has_value else [],
        }
        for minute, expression, has_value in expected
    ]
    tests = {
        "interval": "1m",
        "input_series": list(series),
        "alert_rule_test": list(alerts),
        "promql_expr_test": expressions,
    }
    test = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [tests]}
    (folder / "test.yml").write_text(yaml.safe_dump(test), encoding="utf-8")
    result = subprocess.run(
        [components.require("promtool"), "test", "rules", "test.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def firing(alert: str) -> str:
    """Return an expression that has a value while an alert fires."""
    return f'ALERTS{{alertname="{alert}",alertstate="firing"}}'


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
