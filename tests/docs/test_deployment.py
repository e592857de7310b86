"""The manifests, the Dockerfile and the unit of the documentation fit the command that they run."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from feedapi_client.cli import command
from feedapi_client.testing import Publisher
from tests.cli.invoke import LEAVES
from tests.docs.snippets import ROOT, blocks, python_blocks

PAGE = "docs/pages/kubernetes.md"
BLOCKS = list(blocks(PAGE))
MANIFESTS: list[dict[str, Any]] = [
    manifest
    for block in BLOCKS
    if block.language == "yaml"
    for manifest in yaml.safe_load_all(block.text)
]
DEPLOYMENTS = [each for each in MANIFESTS if each["kind"] == "Deployment"]
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


def text_of(language: str) -> str:
    (found,) = [block.text for block in BLOCKS if block.language == language]
    return found


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The options of a command line of ``feedapi``. Fails for one that it does not take."""
    name, *options = arguments
    secrets = dict.fromkeys(re.findall(r"--auth-env[= ](\w+)", " ".join(options)), "s")
    with patch.dict(os.environ, secrets):
        return dict(LEAVES[name].make_context(name, options).params)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["metadata"]["name"])
def test_the_probes_and_the_grace_period_fit_the_arguments(deployment: dict[str, Any]) -> None:
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = parsed(["run", *container["args"]])
    host, port = options["monitor"].split(":")
    assert host == "0.0.0.0", "the probes come from elsewhere"
    (listed,) = container["ports"]
    assert listed["containerPort"] == int(port)
    assert options["grace"] < pod["terminationGracePeriodSeconds"]
    probes = {name: probe for name, probe in container.items() if name.endswith("Probe")}
    assert {name: probe["httpGet"]["path"] for name, probe in probes.items()} == {
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    } | ({"startupProbe": "/healthz"} if "startupProbe" in probes else {})
    assert all(probe["httpGet"]["port"] == listed["name"] for probe in probes.values())
    # More than the monitor waits for a busy event loop.
    assert all(
        probe["timeoutSeconds"] > 2 for name, probe in probes.items() if name != "startupProbe"
    )


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["metadata"]["name"])
def test_several_replicas_share(deployment: dict[str, Any]) -> None:
    spec = deployment["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    shares = parsed(["run", *container["args"]])["share"]
    assert shares == (spec["replicas"] > 1)
    assert shares or spec["strategy"] == {"type": "Recreate"}


def test_secrets_are_named_by_the_arguments_and_never_among_them() -> None:
    (secret,) = [each for each in MANIFESTS if each["kind"] == "Secret"]
    (container,) = DEPLOYMENTS[0]["spec"]["template"]["spec"]["containers"]
    arguments = " ".join(container["args"])
    for name, value in secret["stringData"].items():
        assert name in arguments
        assert value not in arguments


def test_the_selectors_match_the_labels() -> None:
    for deployment in DEPLOYMENTS:
        spec = deployment["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    (budget,) = [each for each in MANIFESTS if each["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["selector"] == DEPLOYMENTS[1]["spec"]["selector"]


def test_the_dockerfile_installs_extras_that_exist_and_runs_the_command() -> None:
    lines = [line.split(" ", 1) for line in text_of("dockerfile").splitlines() if line]
    steps = dict(lines)
    assert lines[0][0] == "FROM"
    extras = re.search(r"feedapi_client-\*\.whl\)\[([^\]]+)\]", steps["RUN"])
    assert extras is not None
    assert {"cli", "monitor"} <= set(extras[1].split(",")) <= EXTRAS
    assert json.loads(steps["ENTRYPOINT"]) == ["feedapi", "run"]
    assert int(steps["USER"]) > 0


def test_the_unit_fits_the_command() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text_of("ini"))
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "feedapi"
    options = parsed(arguments)
    assert options["grace"] < float(service["TimeoutStopSec"])
    assert options["store"].startswith(f"/var/lib/{service['StateDirectory']}/")
    assert set(service["RestartPreventExitStatus"].split()) == {"2", "4"}


@pytest.mark.slow
@pytest.mark.parametrize("function", ["handle", "opened"])
def test_the_handler_of_the_page_runs(
    function: str, tmp_path: Path, feedapi_publisher: Publisher
) -> None:
    feedapi_publisher.extend(0, [{"n": n} for n in range(3)])
    (module,) = python_blocks("docs/pages/kubernetes.md")
    (tmp_path / "orders.py").write_text(module)
    command = [sys.executable, "-m", "feedapi_client.cli", "run", str(feedapi_publisher.url)]
    options = ["--handler", f"orders:{function}", "--store", "cursors.db", "--no-follow"]
    done = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"'n': (\d+)", done.stdout) == ["0", "1", "2"]


def test_what_is_not_restarted_is_what_the_unit_does_not_restart() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    (sentence,) = re.findall(r"Restart it after any .+? but (.+?)\.\n", page, re.DOTALL)
    unit = re.search(r"RestartPreventExitStatus=(.+)", text_of("ini"))
    assert unit is not None
    assert re.findall(r"\b(\d+) \(", sentence) == ["0", *unit[1].split()]
    assert [int(code) for code in unit[1].split()] == [command.USAGE, command.FENCED]
