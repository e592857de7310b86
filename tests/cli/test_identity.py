"""How commands show who they are: certificates, token files, OAuth; and the journal of `run`."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from feedapi_client.testing import Publisher
from tests.cli.conftest import Feedapi
from tests.http.certificates import self_signed, serve_https


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "app_for_identities"
    (tmp_path / f"{name}.py").write_text("async def handle(batch): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return f"{name}:handle"


def test_doctor_and_run_show_a_certificate(feedapi: Feedapi, tmp_path: Path, handler: str) -> None:
    server, client = self_signed(tmp_path, "127.0.0.1"), self_signed(tmp_path, "client.internal")
    publisher = Publisher(1)
    publisher.append(0, {"n": 1})
    with serve_https(publisher, server, clients=client) as url:
        trust = ("--ca-file", server.path)
        shown = (*trust, "--cert", client.path, "--cert-key", client.key)
        refused = feedapi("doctor", url, *trust, "--timeout", 2)
        assert refused.exit_code == 69, refused.output
        assert feedapi("doctor", url, *shown).exit_code == 0
        run = ("run", url, "--no-follow", "--handler", handler, "--store", "cursors.db")
        assert feedapi(*run, *shown).exit_code == 0
        as_curl = (*trust, "--cert", client.path, "--key", client.key)
        assert feedapi(*run, *as_curl).exit_code == 0
        by_key = feedapi(*run, *shown, "--key", "/n", "--name", "by-key")
        assert by_key.exit_code == 0, by_key.output


def asking(url: object) -> tuple[tuple[object, ...], ...]:
    """Commands that ask the feed, and the option of the certificate's key in each."""
    return (
        ("discover", url, "--key"),
        ("cat", url, "--cert-key"),
        ("cat", url, "--store", "cursors.db", "--cert-key"),
        ("cursors", "ls", "--store", "cursors.db", "--lag", url, "--key"),
        ("cursors", "skip", url, "--store", "cursors.db", "--key"),
    )


def test_every_command_that_asks_a_feed_shows_a_certificate(
    feedapi: Feedapi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server, client = self_signed(tmp_path, "127.0.0.1"), self_signed(tmp_path, "client.internal")
    publisher = Publisher(1)
    publisher.append(0, {"n": 1})
    with serve_https(publisher, server, clients=client) as url:
        refused = feedapi("discover", url, "--ca", server.path, "--give-up-after", 0)
        assert refused.exit_code == 1, refused.output
        for *command, key in asking(url):
            result = feedapi(*command, key, client.key, "--ca", server.path, "--cert", client.path)
            assert result.exit_code == 0, result.output


def test_every_command_that_asks_a_feed_sends_the_token_of_a_file(
    feedapi: Feedapi,
    feedapi_publisher: Publisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    feedapi_publisher.append(0, {"n": 1})
    feedapi_publisher.bearer = "of-the-file"
    (tmp_path / "token").write_text("of-the-file\n")
    assert feedapi("discover", feedapi_publisher.url).exit_code == 1
    for *command, _ in asking(feedapi_publisher.url):
        result = feedapi(*command, "--token-file", "token")
        assert result.exit_code == 0, result.output
        assert "of-the-file" not in result.output


def test_run_sends_the_token_of_a_file_and_keeps_a_journal(
    feedapi: Feedapi, feedapi_publisher: Publisher, tmp_path: Path, handler: str
) -> None:
    feedapi_publisher.append(0, {"n": 1})
    feedapi_publisher.bearer = "of-the-file"
    token = tmp_path / "token"
    token.write_text("of-the-file\n")
    run = ("run", feedapi_publisher.url, "--no-follow", "--handler", handler)
    run = (*run, "--store", "cursors.db", "--token-file", token, "--journal", 7)
    result = feedapi(*run)
    assert result.exit_code == 0, result.output
    with closing(sqlite3.connect("cursors.db")) as database:
        (count,) = database.execute("SELECT count(*) FROM feedapi_cursors_journal").fetchone()
    assert count >= 1
    assert "of-the-file" not in result.output


@pytest.mark.parametrize("given", ["=0", "=-1", "=nan", "=1e300", "=7days", ""])
def test_a_journal_of_no_length_is_refused(feedapi: Feedapi, given: str) -> None:
    run = ("run", "http://localhost/feed", "--handler", "a:b", "--store", "c.db")
    result = feedapi(*run, f"--journal{given}")
    assert result.exit_code == 2
    assert "--journal" in result.output


def test_doctor_gets_a_token_by_client_credentials(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch, feedapi_publisher_factory: object
) -> None:
    publisher = Publisher(1)
    publisher.bearer = "granted"
    tokens = Publisher(1)
    grant = orjson.dumps({"access_token": "granted", "token_type": "bearer"})

    def token(response: object, request: object, _: object) -> object:
        from feedapi_client.testing import Response

        return Response(200, {"content-type": "application/json"}, grant)

    tokens.fail(token, on="any", times=None)  # type: ignore[arg-type]
    monkeypatch.setenv("SECRET", "s3cret")
    with publisher.serve() as url, tokens.serve() as token_url:
        options = ("--oauth-token-url", token_url, "--oauth-client-id", "me")
        result = feedapi("doctor", url, *options, "--oauth-secret-env", "SECRET")
    assert result.exit_code == 0, result.output
    assert "s3cret" not in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--key", "client.key"), "--cert-key goes with --cert"),
        (("--cert", "missing.pem"), "no certificate with its key"),
        (("--oauth-client-id", "me"), "go together"),
        (
            (
                *("--token-file", "t", "--oauth-token-url", "http://x"),
                *("--oauth-client-id", "me", "--oauth-secret-env", "SECRET"),
            ),
            "not both",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    feedapi: Feedapi, options: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    result = feedapi("doctor", "http://feed.invalid/feed", *options)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output
