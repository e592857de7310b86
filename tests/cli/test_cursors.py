"""``feedapi cursors``."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest

from feedapi_client import FeedKey, Position, SQLiteCursorStore
from feedapi_client.testing import Publisher
from tests.cli.conftest import Feedapi
from tests.servers import Redis

Make = Callable[..., Publisher]
HOUR = timedelta(hours=1)


@pytest.fixture
def publisher(feedapi_publisher_factory: Make) -> Publisher:
    publisher = feedapi_publisher_factory(2, page_size=10, checkpoint_every=5)
    publisher.extend(0, [{"n": n} for n in range(7)])
    return publisher


@pytest.fixture
def filled(feedapi: Feedapi, publisher: Publisher, store: Path) -> Path:
    """A store with the cursors of a consumer that read everything."""
    assert feedapi("cat", publisher.url, "--store", store).exit_code == 0
    return store


def _export(feedapi: Feedapi, store: object, *args: object) -> list[dict[str, Any]]:
    result = feedapi("cursors", "export", "--store", store, *args)
    assert result.exit_code == 0, result.output
    feeds: list[dict[str, Any]] = orjson.loads(result.stdout)["feeds"]
    return feeds


def _cursors(feedapi: Feedapi, store: object, *args: object) -> dict[int, str]:
    (feed,) = _export(feedapi, store, *args)
    return {row["partition"]: row["cursor"] for row in feed["positions"]}


# ---------------------------------------------------------------------- ls


def test_ls_shows_each_position(feedapi: Feedapi, publisher: Publisher, filled: Path) -> None:
    result = feedapi("cursors", "ls", "--store", filled)
    assert result.exit_code == 0
    assert f"default @ {publisher.url}" in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("0"))
    id, status, revision, cursor = row.split("\t")
    assert (id, status, cursor) == ("0", "open", publisher.end_cursor(0))
    assert int(revision) > 1


def test_show_is_of_one_feed_and_consumer(
    feedapi: Feedapi, publisher: Publisher, filled: Path
) -> None:
    assert (
        feedapi(
            "cursors",
            "set",
            "5",
            "abc",
            "--store",
            filled,
            publisher.url,
            "--name",
            "other",
        ).exit_code
        == 0
    )
    several = feedapi("cursors", "show", "--store", filled)
    assert several.exit_code == 1
    assert "choose by FEED and --name" in several.output
    shown = feedapi("cursors", "show", "--store", filled, "--name", "other")
    assert shown.exit_code == 0
    id, status, _, cursor = shown.stdout.splitlines()[-1].split("\t")
    assert (id, status, cursor) == ("5", "open", "abc")
    assert f"default @ {publisher.url}" not in shown.stdout
    unknown = feedapi("cursors", "show", "--store", filled, "--name", "nobody")
    assert (unknown.exit_code, "no positions of such a feed" in unknown.output) == (1, True)


def test_ls_prints_tab_separated_columns_where_stdout_is_no_terminal(
    feedapi: Feedapi, store: Path
) -> None:
    async def save() -> None:
        async with SQLiteCursorStore(store) as cursors:
            await cursors.save(
                FeedKey("http://h/feed"), {id: Position(f"cursor-{id}") for id in range(32768)}
            )

    anyio.run(save)
    lines = feedapi("cursors", "ls", "--store", store).stdout.splitlines()
    assert len(lines) == 2 + 32768
    assert lines[-1].split("\t") == ["32767", "open", "1", "cursor-32767"]


def test_ls_json_is_what_export_prints(feedapi: Feedapi, filled: Path) -> None:
    assert orjson.loads(feedapi("cursors", "ls", "--store", filled, "--json").stdout)[
        "feeds"
    ] == _export(feedapi, filled)


def test_ls_with_url_shows_the_lag_of_each_partition(
    feedapi: Feedapi, publisher: Publisher, filled: Path
) -> None:
    publisher.append(1, {"n": 1})
    publisher.add(5)
    publisher.split(0, into=(6,), method="starts-after")
    found = orjson.loads(
        feedapi("cursors", "ls", "--store", filled, "--lag", publisher.url, "--json").stdout
    )["feeds"][0]
    lags = {row["partition"]: row["lag"] for row in found["positions"]}
    assert lags == {0: "caught up", 1: "behind", 5: "not begun", 6: "not begun, starts after 0"}


def test_ls_with_url_shows_which_lags_are_unknown(
    feedapi: Feedapi, publisher: Publisher, filled: Path
) -> None:
    publisher.fail(403, partition=0, times=None)
    publisher.remove(1)
    refused = feedapi("cursors", "ls", "--store", filled, "--lag", publisher.url)
    assert refused.exit_code == 1
    assert "403" in refused.stderr
    publisher.heal()
    publisher.fail(503, partition=0, times=None)
    assert (
        "unknown (FeedUnavailableError)"
        in feedapi("cursors", "ls", "--store", filled, "--lag", publisher.url).stdout
    )
    assert (
        "no longer listed"
        in feedapi("cursors", "ls", "--store", filled, "--lag", publisher.url).stdout
    )


def test_ls_of_another_feed_is_an_error(feedapi: Feedapi, filled: Path) -> None:
    result = feedapi("cursors", "ls", "--store", filled, "http://elsewhere/feed")
    assert result.exit_code == 1
    assert "no positions of such a feed" in result.stderr


def test_a_store_that_does_not_exist_is_not_created(feedapi: Feedapi, store: Path) -> None:
    result = feedapi("cursors", "ls", "--store", store)
    assert result.exit_code == 1
    assert result.stderr == f"feedapi: {store}: there is no such file\n"
    assert not store.exists()


def test_a_database_without_cursors_is_not_changed(feedapi: Feedapi, store: Path) -> None:
    store.write_bytes(b"")
    result = feedapi("cursors", "ls", "--store", store)
    assert result.exit_code == 1
    assert "holds no cursors" in result.stderr
    assert store.read_bytes() == b""


def test_the_store_may_be_named_in_the_environment(
    feedapi: Feedapi, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEEDAPI_STORE", str(filled))
    assert feedapi("cursors", "ls").exit_code == 0
    monkeypatch.setenv("MY_DATABASE", str(filled))
    assert feedapi("cursors", "ls", "--store", "env:MY_DATABASE").exit_code == 0
    assert feedapi("cursors", "ls", "--store", "env:NOT_SET_ANYWHERE").exit_code == 2


# ---------------------------------------------------------------------- set


def test_set_makes_the_consumer_go_on_from_there(
    feedapi: Feedapi, publisher: Publisher, filled: Path
) -> None:
    result = feedapi("cursors", "set", 0, "_first", "--store", filled)
    assert result.exit_code == 0
    assert result.stdout == f"default @ {publisher.url}: partition 0 is at '_first'\n"
    assert feedapi("cat", publisher.url, "--store", filled).stdout.count("\n") == 7


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16"])
def test_import_reads_what_another_program_saved(
    feedapi: Feedapi, filled: Path, tmp_path: Path, coding: str
) -> None:
    text = feedapi("cursors", "export", "--store", filled).stdout
    backup = tmp_path / "backup.json"
    backup.write_bytes(text.replace("\n", "\r\n").encode(coding))
    other = tmp_path / "other.db"
    assert feedapi("cursors", "import", backup, "--store", other).exit_code == 0
    assert _cursors(feedapi, other) == _cursors(feedapi, filled)


def test_set_creates_a_store_for_a_complete_url(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    result = feedapi(
        "cursors",
        "set",
        0,
        publisher.end_cursor(0),
        "--store",
        store,
        publisher.url,
        "--name",
        "me",
    )
    assert result.exit_code == 0, result.output
    assert _cursors(feedapi, store, "--name", "me") == {0: publisher.end_cursor(0)}
    assert feedapi("cat", publisher.url, "--store", store, "--name", "me").stdout == ""


def test_set_of_filtered_cursors(feedapi: Feedapi, store: Path) -> None:
    assert (
        feedapi(
            "cursors", "set", 0, "c", "--store", store, "http://h/feed", "--filter", "a=b"
        ).exit_code
        == 0
    )
    assert _export(feedapi, store)[0]["filters"] == {"filter-a": "b"}


def test_set_needs_to_know_which_feed_is_meant(
    feedapi: Feedapi, publisher: Publisher, filled: Path
) -> None:
    feedapi("cat", publisher.url, "--store", filled, "--name", "other")
    result = feedapi("cursors", "set", 0, "_first", "--store", filled)
    assert result.exit_code == 1
    assert "choose by FEED and --name" in result.stderr
    assert (
        feedapi("cursors", "set", 0, "_first", "--store", filled, "--name", "other").exit_code == 0
    )


def test_r17_set_fences_a_running_consumer(
    feedapi: Feedapi, publisher: Publisher, filled: Path
) -> None:
    publisher.append(0, {"n": 7})

    def meddle(response: Any, request: Any, publisher: Publisher) -> Any:
        # A process of its own: this is the thread of the publisher's event loop.
        command = [
            sys.executable,
            "-m",
            "feedapi_client.cli",
            "cursors",
            "set",
            "0",
            "_first",
            "--store",
            str(filled),
        ]
        subprocess.run(command, check=True, capture_output=True)
        return response

    publisher.fail(meddle)
    result = feedapi("cat", publisher.url, "--store", filled)
    assert result.exit_code == 1
    assert "another consumer" in result.stderr


# ---------------------------------------------------------------------- reset


def test_reset_asks_for_confirmation(feedapi: Feedapi, filled: Path) -> None:
    refused = feedapi("cursors", "reset", "--store", filled, input="n\n")
    assert refused.exit_code == 1
    assert "forget 2 of 2 positions?" in refused.stdout
    assert len(_cursors(feedapi, filled)) == 2
    assert feedapi("cursors", "reset", "--store", filled, input="y\n").exit_code == 0
    assert _export(feedapi, filled) == []


def test_reset_without_an_answer_deletes_nothing(feedapi: Feedapi, filled: Path) -> None:
    result = feedapi("cursors", "reset", "--store", filled)
    assert result.exit_code == 1
    assert "aborted" in result.stderr
    assert len(_cursors(feedapi, filled)) == 2


def test_reset_of_one_partition(feedapi: Feedapi, filled: Path) -> None:
    assert feedapi("cursors", "reset", "--store", filled, "-p", 0, "--yes").stdout.endswith(
        "1 positions forgotten\n"
    )
    assert _cursors(feedapi, filled).keys() == {1}
    assert feedapi("cursors", "reset", "--store", filled, "-p", 0, "--yes").exit_code == 1


# ---------------------------------------------------------------------- export, import


def test_an_export_can_be_imported_into_another_store(
    feedapi: Feedapi, publisher: Publisher, filled: Path, tmp_path: Path
) -> None:
    saved, other = tmp_path / "cursors.json", tmp_path / "other.db"
    saved.write_bytes(feedapi("cursors", "export", "--store", filled).stdout_bytes)
    assert feedapi("cursors", "import", saved, "--store", other).exit_code == 0
    assert _cursors(feedapi, other) == _cursors(feedapi, filled)
    assert feedapi("cat", publisher.url, "--store", other).stdout == ""


def test_import_from_stdin_replaces(feedapi: Feedapi, filled: Path) -> None:
    saved = feedapi("cursors", "export", "--store", filled).stdout
    feedapi("cursors", "set", 0, "_first", "--store", filled)
    before = _export(feedapi, filled)[0]["positions"][0]["revision"]
    assert feedapi("cursors", "import", "-", "--store", filled, input=saved).exit_code == 0
    assert _export(feedapi, filled)[0]["positions"][0]["revision"] > before
    assert _cursors(feedapi, filled)[0] != "_first"


def test_import_asks_before_it_replaces_positions(
    feedapi: Feedapi, filled: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "cursors.json"
    saved.write_bytes(feedapi("cursors", "export", "--store", filled).stdout_bytes)
    result = feedapi("cursors", "import", saved, "--store", filled, input="n\n")
    assert result.exit_code == 1
    assert "2 positions are there already" in result.stdout


def _export_of(position: str) -> str:
    """An export with one feed and one position."""
    feed = f'{{"url":"http://u/f","name":"n","filters":{{}},"positions":[{position}]}}'
    return f'{{"format":"feedapi-cursors/1","feeds":[{feed}]}}'


def test_import_reads_an_export(feedapi: Feedapi, store: Path) -> None:
    text = _export_of('{"partition":7,"cursor":"c","status":"open"}')
    assert feedapi("cursors", "import", "-", "--store", store, input=text).exit_code == 0
    assert _cursors(feedapi, store) == {7: "c"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format":"feedapi-cursors/1","feeds":[{}]}',
        _export_of('{"partition":70000,"cursor":"c","status":"open"}'),
        _export_of('{"partition":0,"cursor":"c","status":"lost"}'),
        _export_of('{"partition":0,"cursor":"_last","status":"open"}'),
    ],
)
def test_import_refuses_anything_but_an_export(feedapi: Feedapi, store: Path, text: str) -> None:
    result = feedapi("cursors", "import", "-", "--store", store, input=text)
    assert result.exit_code == 2
    assert "no export of cursors" in result.stderr
    assert not store.exists()


def test_an_import_file_that_does_not_exist_is_reported_on_one_line(
    feedapi: Feedapi, store: Path, tmp_path: Path
) -> None:
    result = feedapi("cursors", "import", tmp_path / "nothing.json", "--store", store)
    assert result.exit_code == 1
    assert result.stderr == f"feedapi: {tmp_path / 'nothing.json'}: No such file or directory\n"


# ---------------------------------------------------------------------- rewind


@pytest.fixture
def journalled(feedapi: Feedapi, publisher: Publisher, journalled_store: Path) -> tuple[Path, str]:
    """A store with a journal, and a time between two runs of its consumer."""
    store = journalled_store
    assert feedapi("cat", publisher.url, "--store", store).exit_code == 0
    between = datetime.now(UTC)
    while datetime.now(UTC) <= between:  # until the clock has moved on
        time.sleep(0)
    publisher.append(0, {"n": 7})
    assert feedapi("cat", publisher.url, "--store", store).stdout.count("\n") == 1
    return store, between.isoformat()


def test_rewind_takes_the_consumer_back(
    feedapi: Feedapi, publisher: Publisher, journalled: tuple[Path, str]
) -> None:
    store, between = journalled
    assert feedapi("cursors", "rewind", "--to", between, "--store", store, "--yes").exit_code == 0
    assert feedapi("cat", publisher.url, "--store", store, "--raw").stdout == '{"n":7}\n'


def test_rewind_dry_run_shows_the_changes_and_makes_none(
    feedapi: Feedapi, publisher: Publisher, journalled: tuple[Path, str]
) -> None:
    store, between = journalled
    before = _cursors(feedapi, store)
    result = feedapi("cursors", "rewind", "--to", between, "--store", store, "--dry-run")
    assert result.exit_code == 0
    assert publisher.end_cursor(0) in result.stdout
    assert _cursors(feedapi, store) == before


def test_rewind_asks_for_confirmation(feedapi: Feedapi, journalled: tuple[Path, str]) -> None:
    store, between = journalled
    before = _cursors(feedapi, store)
    assert (
        feedapi("cursors", "rewind", "--to", between, "--store", store, input="n\n").exit_code == 1
    )
    assert _cursors(feedapi, store) == before


def test_changes_by_commands_are_journalled(feedapi: Feedapi, journalled: tuple[Path, str]) -> None:
    store, between = journalled
    feedapi("cursors", "set", 0, "_first", "--store", store)
    assert feedapi("cursors", "rewind", "--to", between, "--store", store, "--yes").exit_code == 0
    assert _cursors(feedapi, store)[0] != "_first"


def test_rewind_without_a_journal_is_reported_on_one_line(feedapi: Feedapi, filled: Path) -> None:
    result = feedapi("cursors", "rewind", "--to", "2 hours ago", "--store", filled, "--yes")
    assert result.exit_code == 1
    assert "keeps no journal" in result.stderr
    assert result.stderr.count("\n") == 1


def test_rewind_to_before_the_journal_is_reported_on_one_line(
    feedapi: Feedapi, journalled: tuple[Path, str]
) -> None:
    store, between = journalled
    result = feedapi("cursors", "rewind", "--to", "2 hours ago", "--store", store, "--yes")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    begin = result.stderr.partition("The journal knows positions from ")[2].partition(" on. ")[0]
    assert abs(datetime.fromisoformat(begin) - datetime.fromisoformat(between)) < HOUR
    assert "'feedapi cursors reset' begins anew" in result.stderr


# ---------------------------------------------------------------------- other stores


def test_a_database_given_by_url(feedapi: Feedapi, publisher: Publisher, store: Path) -> None:
    url = f"sqlite+aiosqlite:///{store}"
    assert feedapi("cat", publisher.url, "--store", url).exit_code == 0
    assert _cursors(feedapi, url) == _cursors(feedapi, store)
    assert feedapi("cursors", "set", 0, "_first", "--store", url).exit_code == 0
    assert feedapi("cursors", "ls", "--store", url, "--table", "nothing").exit_code == 1


def test_a_redis_given_by_url(feedapi: Feedapi, publisher: Publisher, redis_server: Redis) -> None:
    assert feedapi("cat", publisher.url, "--store", redis_server.url).exit_code == 0
    assert _cursors(feedapi, redis_server.url)[0] == publisher.end_cursor(0)
    rewind = feedapi("cursors", "rewind", "--to", "now", "--store", redis_server.url, "--yes")
    assert rewind.exit_code == 2
    assert "keeps no journal" in rewind.stderr


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@127.0.0.1:1/db?password=secret",
        "postgresql+psycopg2://me:secret@localhost/db",
        "redis://me:secret@127.0.0.1:1/0",
    ],
)
def test_r19_a_database_that_can_not_be_opened_is_reported_without_its_password(
    feedapi: Feedapi, url: str
) -> None:
    result = feedapi("cursors", "ls", "--store", url)
    assert result.exit_code == 1, result.output
    assert "secret" not in result.output
    assert result.stderr.count("\n") == 1
