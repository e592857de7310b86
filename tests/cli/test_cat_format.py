"""``feedapi cat``: templates, and certificates."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from feedapi_client.model import Batch
from feedapi_client.testing import Publisher
from tests.cli.conftest import Feedapi
from tests.cli.invoke import LEAVES
from tests.http.certificates import self_signed, serve_https

Make = Callable[..., Publisher]


@pytest.fixture
def publisher(feedapi_publisher_factory: Make) -> Publisher:
    publisher = feedapi_publisher_factory(1, checkpoint_every=1)
    publisher.append(0, {"entity": "a", "order": {"id": "x1"}, "n": 1})
    publisher.append(0, {"entity": "æ", "order": {"id": 7}})
    publisher.append(0, "text")
    return publisher


def printed(feedapi: Feedapi, publisher: Publisher, *options: object) -> str:
    result = feedapi("cat", publisher.url, *options)
    assert result.exit_code == 0, result.stderr
    text: str = result.stdout
    return text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (r"%p\t%i\n", "0\t1\n0\t2\n0\t3\n"),
        (r"%S %%\n", "40 %\n32 %\n6 %\n"),
        (r"%h,", "{},{},{},"),
        (r"\\", "\\\\\\"),
    ],
)
def test_verbs(feedapi: Feedapi, publisher: Publisher, template: str, expected: str) -> None:
    assert printed(feedapi, publisher, "--format", template) == expected


def test_the_payload_is_that_of_the_publisher(feedapi: Feedapi, publisher: Publisher) -> None:
    assert printed(feedapi, publisher, "--format", r"%s\n") == printed(feedapi, publisher, "--raw")


def test_the_cursor_is_that_of_the_checkpoint_behind_the_event(
    feedapi: Feedapi, publisher: Publisher
) -> None:
    cursors = printed(feedapi, publisher, "--format", r"%c\n").splitlines()
    assert cursors[-1] == publisher.end_cursor(0)
    behind = ("--partition", 0, "--from", cursors[-1])
    assert printed(feedapi, publisher, *behind, "--format", "%s") == ""


def test_headers_are_json(feedapi: Feedapi, feedapi_publisher_factory: Make) -> None:
    publisher = feedapi_publisher_factory(1, dialect="v1")
    publisher.append(0, {"n": 1}, headers={"trace": "t1"})
    options = ("--v1-partitions", 1, "--v1-header", "_all", "--format", "%h")
    assert printed(feedapi, publisher, *options) == '{"trace":"t1"}'


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--format", "%x"), "there is no verb %x"),
        (("--format", r"\q"), r"there is no escape \q"),
        (("--format", "100%"), "at the end"),
        (("--format", "%s", "--raw"), "can't be combined"),
    ],
)
def test_a_wrong_template_is_a_usage_error(
    feedapi: Feedapi, publisher: Publisher, options: tuple[str, ...], problem: str
) -> None:
    result = feedapi("cat", publisher.url, *options)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert publisher.requests == []


# ---------------------------------------------------------------------- certificates, examples


def test_a_file_without_certificates_is_a_usage_error(
    feedapi: Feedapi, publisher: Publisher, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    relay = ("relay", "--stream", "s", "--store", tmp_path / "relayed.db")
    handler = f"{__name__}:handle"
    run = ("run", "--handler", handler, "--store", tmp_path / "cursors.db")
    for command in (("cat",), ("discover",), ("doctor",), run, relay):
        for file in (tmp_path / "ca.pem", tmp_path / "absent.pem"):
            result = feedapi(*command, publisher.url, "--ca-file", file)
            assert result.exit_code == 2
            assert "holds no certificates" in result.stderr


async def handle(batch: Batch) -> None:
    """For ``feedapi run``."""


@pytest.fixture
def https(publisher: Publisher, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve the publisher with a certificate of its own: its URL, and the certificate."""
    certificate = self_signed(tmp_path, "127.0.0.1")
    with serve_https(publisher, certificate) as url:
        yield url, certificate.path


def test_a_certificate_of_ones_own_is_trusted_with_ca_file(
    feedapi: Feedapi, https: tuple[str, Path], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, certificate = https
    refused = feedapi("discover", url)
    assert refused.exit_code == 1
    assert "certificate can't be verified" in refused.stderr
    cursors = ("--store", store)
    for command in (
        ("discover", url),
        ("cat", url, *cursors),
        ("doctor", url),
        ("cursors", "ls", *cursors, "--lag", url),
        ("cursors", "skip", url, *cursors),
        ("run", url, *cursors, "--no-follow", "--handler", f"{__name__}:handle", "--name", "run"),
    ):
        result = feedapi(*command, "--ca-file", certificate)
        assert result.exit_code == 0, result.output
    monkeypatch.setenv("FEEDAPI_CA_FILE", str(certificate))
    assert feedapi("discover", url).exit_code == 0


EXAMPLES = {
    name: (leaf.epilog or "").split("\n\n")[0].split("\n")[2:] for name, leaf in LEAVES.items()
}


def test_every_command_has_examples() -> None:
    assert [name for name, examples in EXAMPLES.items() if not examples] == ["ingest"]


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {"ingest"}))
def test_the_examples_are_shown_and_can_be_parsed(
    feedapi: Feedapi, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "Bearer sesame")
    text = " ".join(feedapi(*name.split(), "--help").stdout.split())
    for example in EXAMPLES[name]:
        assert " ".join(example.split()) in text
        words = shlex.split(example.partition(" > ")[0].removeprefix(f"feedapi {name}"))
        LEAVES[name].make_context(name, words)  # raises for what the command does not take


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("ingest", "feedapi_client.spark.ingest.ingest_command"),
    ],
)
def test_the_examples_of_other_programs_are_shown_and_can_be_parsed(name: str, module: str) -> None:
    command = importlib.import_module(module)
    text = command.parser().format_help()
    for example in command.EXAMPLES:
        assert f"feedapi {name} {example}" in text
        command.parser().parse_args(shlex.split(example))
