"""``feedapi cursors skip``, ``drain`` and ``move``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import orjson
import pytest

from feedapi_client import FeedKey, Position, SQLiteCursorStore
from feedapi_client.testing import Publisher, Quirks
from tests.cli.conftest import Feedapi, OnTerminal
from tests.positions import stand

Make = Callable[..., Publisher]


@pytest.fixture
def publisher(feedapi_publisher_factory: Make) -> Publisher:
    publisher = feedapi_publisher_factory(2, page_size=10, checkpoint_every=5)
    publisher.extend(0, [{"n": n} for n in range(27)])
    publisher.extend(1, [{"m": n} for n in range(3)])
    return publisher


def _positions(store: Path, key: FeedKey) -> Mapping[int, Position]:
    async def load() -> Mapping[int, Position]:
        async with SQLiteCursorStore(store) as cursors:
            return await cursors.load(key)

    return anyio.run(load)


def _save(store: Path, key: FeedKey, positions: Mapping[int, Position]) -> None:
    async def save() -> None:
        async with SQLiteCursorStore(store) as cursors:
            await cursors.save(key, positions)

    anyio.run(save)


def _key(publisher: Publisher, name: str = "default") -> FeedKey:
    assert publisher.url is not None
    return FeedKey(publisher.url, name)


# ---------------------------------------------------------------------- skip


def test_r7_skip_saves_the_ends_without_delivering(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    result = feedapi("cursors", "skip", publisher.url, "--store", store)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"default @ {publisher.url}: 30 events skipped, 2 positions saved\n"
    ends = {id: (publisher.end_cursor(id), "open") for id in (0, 1)}
    assert stand(_positions(store, _key(publisher))) == ends
    publisher.append(0, {"n": "new"})
    assert feedapi("cat", publisher.url, "--store", store, "--raw").stdout == '{"n":"new"}\n'


def test_r7_skip_is_the_way_out_when_last_has_no_cursor(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    def refuse_last(response: Any, request: Any, publisher: Publisher) -> Any:
        assert request.query.get("cursor") != "_last"
        return response

    publisher.fail(refuse_last, times=None)
    assert feedapi("cursors", "skip", publisher.url, "--store", store).exit_code == 0
    assert feedapi("cat", publisher.url, "--store", store, "--from", "last").stdout == ""


@pytest.mark.usefixtures("short_waits")
def test_skip_saves_what_lineage_asks_for(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    publisher.split(0, into=(2, 3), method="starts-after")
    publisher.split(1, into=(4,), method="cursor-from")
    publisher.extend(2, [{"n": 1}])
    publisher.extend(4, [{"n": 1}])
    assert feedapi("cursors", "skip", publisher.url, "--store", store).exit_code == 0
    found = _positions(store, _key(publisher))
    assert found[0].status == "drained"
    assert [found[id].status for id in (2, 3, 4)] == ["open"] * 3
    publisher.append(3, {"n": "new"})
    assert feedapi("cat", publisher.url, "--store", store, "--raw").stdout == '{"n":"new"}\n'


def test_skip_goes_on_from_stored_cursors(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    feedapi("cat", publisher.url, "--store", store)
    before = _positions(store, _key(publisher))
    publisher.extend(0, [{"n": n} for n in range(4)])
    result = feedapi("cursors", "skip", publisher.url, "--store", store)
    assert result.stdout.endswith(": 4 events skipped, 1 positions saved\n")
    after = _positions(store, _key(publisher))
    assert stand(after) == stand(before) | {0: (publisher.end_cursor(0), "open")}
    again = feedapi("cursors", "skip", publisher.url, "--store", store)
    assert again.stdout.endswith(": 0 events skipped, 0 positions saved\n")


def test_skip_of_one_partition_leaves_the_others_alone(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    result = feedapi("cursors", "skip", publisher.url, "--store", store, "-p", 0)
    assert stand(_positions(store, _key(publisher))) == {0: (publisher.end_cursor(0), "open")}
    assert "start at their beginning" in result.stderr
    assert feedapi("cat", publisher.url, "--store", store).stdout.count('"m"') == 3


def test_skip_with_a_selection_saves_its_cursors(
    feedapi: Feedapi, feedapi_publisher_factory: Make, store: Path
) -> None:
    publisher = feedapi_publisher_factory(1, dialect="v2-draft", filters=("n",))
    publisher.extend(0, [{"n": str(n)} for n in range(3)])
    result = feedapi("cursors", "skip", publisher.url, "--store", store, "--filter", "n=1")
    assert result.stdout.endswith("1 events skipped, 1 positions saved\n")
    key = FeedKey(_key(publisher).url, "default", {"filter-n": "1"})
    assert _positions(store, key).keys() == {0}


def test_r17_skip_does_not_move_a_consumer_that_runs(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    feedapi("cat", publisher.url, "--store", store)
    publisher.append(0, {"n": "new"})
    moved = _positions(store, _key(publisher))[0].advance("elsewhere")

    def meddle(response: Any, request: Any, publisher: Publisher) -> Any:
        # A thread of its own: this is the thread of the publisher's event loop.
        thread = Thread(target=_save, args=(store, _key(publisher), {0: moved}))
        thread.start()
        thread.join()
        return response

    publisher.fail(meddle, times=1)
    result = feedapi("cursors", "skip", publisher.url, "--store", store)
    assert result.exit_code == 1
    assert "another consumer" in result.stderr
    assert _positions(store, _key(publisher))[0] == moved


@pytest.mark.usefixtures("short_waits")
def test_a_skip_that_fails_saves_nothing(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    publisher.fail(403, partition=1, times=None)
    result = feedapi("cursors", "skip", publisher.url, "--store", store)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert _positions(store, _key(publisher)) == {}


def test_skip_shows_progress_on_a_terminal(
    on_terminal: OnTerminal, publisher: Publisher, store: Path
) -> None:
    code, shown = on_terminal("stderr", "cursors", "skip", publisher.url, "--store", store)
    assert code == 0
    assert "30 events" in shown


# ---------------------------------------------------------------------- drain


@pytest.fixture
def closed(feedapi: Feedapi, publisher: Publisher, store: Path) -> Publisher:
    """Partition 0 is closed behind a cursor from which the feed gives nothing; 5 waits for it."""
    feedapi("cat", publisher.url, "--store", store)
    publisher.split(0, into=(5,), method="starts-after")
    return publisher


def _drain(feedapi: Feedapi, publisher: Publisher, store: Path, *args: object, **more: Any) -> Any:
    return feedapi("cursors", "drain", publisher.url, *args, "--store", store, **more)


def test_r6_drain_marks_a_closed_partition(
    feedapi: Feedapi, closed: Publisher, store: Path
) -> None:
    before = _positions(store, _key(closed))[0]
    result = _drain(feedapi, closed, store, 0, "--yes")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"default @ {closed.url}: partition 0 is drained\n"
    assert stand(_positions(store, _key(closed)))[0] == (before.cursor, "drained")
    closed.append(5, {"child": 1})
    closed.fail(403, partition=0, times=None)
    assert feedapi("cat", closed.url, "--store", store, "--raw").stdout == '{"child":1}\n'


def test_drain_asks_for_confirmation(feedapi: Feedapi, closed: Publisher, store: Path) -> None:
    refused = _drain(feedapi, closed, store, 0, input="n\n")
    assert refused.exit_code == 1
    assert "partition 0 is closed" in refused.stdout
    assert closed.end_cursor(0) in refused.stdout
    assert _positions(store, _key(closed))[0].status == "open"
    assert _drain(feedapi, closed, store, 0, input="y\n").exit_code == 0
    assert _positions(store, _key(closed))[0].status == "drained"
    again = _drain(feedapi, closed, store, 0)
    assert again.exit_code == 0
    assert "drained already" in again.stdout


def test_drain_refuses_an_open_partition(feedapi: Feedapi, closed: Publisher, store: Path) -> None:
    refused = _drain(feedapi, closed, store, 1, "--yes")
    assert refused.exit_code == 1
    assert "partition 1 is open" in refused.stderr
    assert "--force" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert _positions(store, _key(closed))[1].status == "open"
    assert _drain(feedapi, closed, store, 1, "--yes", "--force").exit_code == 0
    assert _positions(store, _key(closed))[1].status == "drained"


def test_r11_drain_of_a_partition_that_is_no_longer_listed(
    feedapi: Feedapi, closed: Publisher, store: Path
) -> None:
    closed.remove(1)
    result = _drain(feedapi, closed, store, 1, input="y\n")
    assert result.exit_code == 0
    assert "is not listed by the feed" in result.stdout


def test_drain_of_an_unknown_partition_is_refused(
    feedapi: Feedapi, closed: Publisher, store: Path
) -> None:
    refused = _drain(feedapi, closed, store, 9, "--yes")
    assert refused.exit_code == 1
    assert "neither listed by the feed nor stored" in refused.stderr
    assert _drain(feedapi, closed, store, 9, "--yes", "--force").exit_code == 0
    assert stand(_positions(store, _key(closed)))[9] == ("_first", "drained")


def test_drain_of_an_unknown_consumer_is_refused(
    feedapi: Feedapi, closed: Publisher, store: Path
) -> None:
    result = _drain(feedapi, closed, store, 0, "--yes", "--force", "--name", "typo")
    assert result.exit_code == 1
    assert "no cursor is stored" in result.stderr


def test_drain_of_a_superseded_partition_is_refused(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    feedapi("cat", publisher.url, "--store", store)
    publisher.split(0, into=(5,), method="cursor-from")
    feedapi("cat", publisher.url, "--store", store)
    result = _drain(feedapi, publisher, store, 0, "--yes", "--force")
    assert result.exit_code == 1
    assert "superseded" in result.stderr


# ---------------------------------------------------------------------- move


@pytest.fixture
def moved(feedapi: Feedapi, publisher: Publisher, store: Path) -> str:
    """The former URL of the publisher, with the cursors of two consumers."""
    old = "https://former.test:8443" + _key(publisher).url.split("/", 3)[3].join(["/", ""])
    for name in ("default", "other"):
        feedapi("cat", publisher.url, "--store", store, "--name", name)
        result = feedapi("cursors", "move", publisher.url, old, "--store", store, "--name", name)
        assert result.exit_code == 0, result.output
    return old


def test_a_moved_feed_keeps_its_cursors(
    feedapi: Feedapi, publisher: Publisher, moved: str, store: Path
) -> None:
    publisher.append(0, {"n": "new"})
    result = feedapi("cursors", "move", moved, publisher.url, "--store", store)
    assert result.exit_code == 0
    assert result.stdout == "".join(
        f"{name} @ {publisher.url}: 2 positions moved here\n" for name in ("default", "other")
    )
    for name in ("default", "other"):
        read = feedapi("cat", publisher.url, "--store", store, "--name", name, "--raw")
        assert (read.stdout, read.stderr) == ('{"n":"new"}\n', "")


def test_move_refuses_to_replace_cursors(
    feedapi: Feedapi, publisher: Publisher, moved: str, store: Path
) -> None:
    _save(store, _key(publisher, "other"), {0: Position("x"), 7: Position("y")})
    refused = feedapi("cursors", "move", moved, publisher.url, "--store", store)
    assert refused.exit_code == 1
    assert "--overwrite" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert _positions(store, _key(publisher)) == {}
    told = feedapi("cursors", "move", moved, publisher.url, "--store", store, "--overwrite")
    assert told.exit_code == 0
    assert _positions(store, _key(publisher, "other")).keys() == {0, 1}


def test_move_takes_the_url_that_ls_shows(feedapi: Feedapi, store: Path) -> None:
    key = FeedKey("http://old/feed?tenant=1")
    _save(store, key, {0: Position("c")})
    assert key.url in feedapi("cursors", "ls", "--store", store).stdout
    result = feedapi("cursors", "move", key.url, "http://new/feed?tenant=1", "--store", store)
    assert result.exit_code == 0, result.output
    assert _positions(store, FeedKey("http://new/feed?tenant=1")).keys() == {0}


def test_move_of_what_is_not_there(feedapi: Feedapi, store: Path) -> None:
    _save(store, FeedKey("http://old/feed"), {0: Position("c")})
    other = feedapi("cursors", "move", "http://typo/feed", "http://new/feed", "--store", store)
    assert other.exit_code == 1
    assert "holds no cursors of http://typo/feed" in other.stderr
    same = feedapi("cursors", "move", "http://old/feed", "HTTP://OLD/feed", "--store", store)
    assert same.exit_code == 2


def test_r07_a_start_beside_the_cursors_of_the_same_feed_is_refused(
    feedapi: Feedapi, publisher: Publisher, moved: str, store: Path
) -> None:
    url = publisher.url or ""
    refused = feedapi("cat", url, "--store", store)
    command = f"feedapi cursors move {moved} {url} --name default"
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert (refused.stderr.count("\n"), refused.stderr.count(command)) == (1, 1)
    assert feedapi(*command.split()[1:], "--store", store).exit_code == 0
    assert feedapi("cat", url, "--store", store).stdout == ""


@pytest.mark.parametrize("command", ["cat", "run"])
def test_r07_the_first_event_is_for_who_means_it(
    feedapi: Feedapi,
    publisher: Publisher,
    moved: str,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    (tmp_path / f"handles_{command}.py").write_text("async def handle(batch): pass")
    monkeypatch.chdir(tmp_path)
    run = ("--no-follow", "--handler", f"handles_{command}:handle")
    words = (command, publisher.url, "--store", store, *(run if command == "run" else ()))
    refused = feedapi(*words)
    assert (refused.exit_code, "looks like the same feed" in refused.stderr) == (1, True)
    meant = feedapi(*words, "--from", "first")
    assert meant.exit_code == 0, meant.output
    assert _positions(store, _key(publisher)).keys() == {0, 1}


# ---------------------------------------------------------------------- a missing edge


@pytest.fixture
def without_edge(feedapi_publisher_factory: Make) -> Publisher:
    publisher = feedapi_publisher_factory(1, quirks=Quirks(omit_parent_zero=True))
    publisher.append(0, {"n": 0})
    publisher.split(0, into=(1,), method="starts-after")
    publisher.append(1, {"n": 1})
    return publisher


def test_r8_discover_reports_an_edge_that_seems_to_be_missing(
    feedapi: Feedapi, without_edge: Publisher
) -> None:
    result = feedapi("discover", without_edge.url)
    assert result.exit_code == 0
    assert "suspected: partition 0 is closed" in result.stdout
    assert "--lineage 1:0" in result.stdout
    found = orjson.loads(feedapi("discover", without_edge.url, "--json").stdout)
    assert found["suspected_missing_edges"] == {"parents": [0], "children": [1]}


def test_r8_discover_draws_the_edges_that_are_given(
    feedapi: Feedapi, without_edge: Publisher
) -> None:
    result = feedapi("discover", without_edge.url, "--lineage", "1:0")
    assert "└── after (--lineage) ▸ 1  open" in result.stdout
    assert "suspected" not in result.stdout
    found = orjson.loads(feedapi("discover", without_edge.url, "--json", "--lineage", "1:0").stdout)
    assert found["suspected_missing_edges"] is None
    assert found["partitions"][1]["starts_after"] == 0
    wrong = feedapi("discover", without_edge.url, "--lineage", "7:0")
    assert wrong.exit_code == 1
    assert wrong.stderr.count("\n") == 1


@pytest.mark.usefixtures("short_waits")
def test_r8_cat_reads_a_child_after_the_parent_that_is_given(
    feedapi: Feedapi, without_edge: Publisher
) -> None:
    result = feedapi("cat", without_edge.url, "--raw", "--lineage", "1:0")
    assert result.stdout == '{"n":0}\n{"n":1}\n'


@pytest.mark.parametrize("value", ["1", "1:", "a:b", "1:40000", "1:0:2", "-1:0", ""])
def test_an_edge_of_another_form_is_a_usage_error(feedapi: Feedapi, value: str) -> None:
    for command in ("cat", "discover"):
        result = feedapi(command, "http://127.0.0.1:1/feed", f"--lineage={value}")
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1


def test_rename_keeps_the_cursors_of_a_consumer(feedapi: Feedapi, tmp_path: Path) -> None:
    async def fill() -> None:
        async with SQLiteCursorStore(tmp_path / "c.db") as store:
            for url in ("http://a/x", "http://b/y"):
                await store.save(FeedKey(url, "old"), {0: Position("c")})
            await store.save(FeedKey("http://a/x", "taken"), {0: Position("t")})

    async def stored() -> set[str]:
        async with SQLiteCursorStore(tmp_path / "c.db") as store:
            return {f"{key.url} {key.name}" for key in await store.feeds()}

    anyio.run(fill)
    rename = ("cursors", "rename", "--store", tmp_path / "c.db")
    assert feedapi(*rename, "old", "taken").exit_code == 1
    assert feedapi(*rename, "nobody", "new").exit_code == 1
    assert feedapi(*rename, "old", "old").exit_code == 2
    assert feedapi(*rename, "old", "new", "http://b").exit_code == 0
    assert anyio.run(stored) == {"http://a/x old", "http://b/y new", "http://a/x taken"}
    assert feedapi(*rename, "old", "new").exit_code == 0
    assert anyio.run(stored) == {"http://a/x new", "http://b/y new", "http://a/x taken"}


# ---------------------------------------------------------------------- another selection


def test_move_gives_the_cursors_of_a_selection_to_another_one(
    feedapi: Feedapi, store: Path
) -> None:
    url, one, two = "http://a/x", '{"event-types":"a"}', '{"event-types":"a;b"}'
    former = FeedKey(url, "app", {"event-types": "a"})
    _save(store, former, {0: Position("c")})
    _save(store, FeedKey(url, "app"), {0: Position("all")})
    place = ("--store", store, "--name", "app")
    assert feedapi("cursors", "move", url, url, *place).exit_code == 2
    assert feedapi("cursors", "move", url, url, *place, "--selection", one, one).exit_code == 2
    assert feedapi("cursors", "move", url, url, *place, "--selection", one, "a").exit_code == 2
    assert feedapi("cursors", "move", url, url, *place, "--selection", one, "{}").exit_code == 1
    moved = feedapi("cursors", "move", url, url, *place, "--selection", one, two)
    assert moved.stdout == "app @ http://a/x event-types=a;b: 1 positions moved here\n"
    now = _positions(store, FeedKey(url, "app", {"event-types": "a;b"}))
    assert {p: each.cursor for p, each in now.items()} == {0: "c"}
    assert _positions(store, former) == {}
    assert len(_positions(store, FeedKey(url, "app"))) == 1


def test_a_removed_command_names_what_to_use(feedapi: Feedapi) -> None:
    gone = feedapi("cursors", "upgrade", "--store", "cursors.db")
    assert (gone.exit_code, "'cursors move' moves" in gone.stderr) == (2, True)
    assert "upgrade" not in feedapi("cursors", "--help").stdout
