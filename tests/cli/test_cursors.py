"""``feedapi cursors`` and ``feedapi leases``."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest

from feedapi_client import FeedKey, Position, SQLiteCursorStore
from feedapi_client.model import Status
from feedapi_client.stores import Journal, Lease
from feedapi_client.testing import Publisher
from tests.cli.conftest import Feedapi, OnTerminal
from tests.cli.invoke import Invoked, Row, play
from tests.leases import claims
from tests.positions import stand
from tests.servers import Redis

Make = Callable[..., Publisher]
Play = Callable[..., Invoked]
Stand = dict[int, tuple[str, Status]]
pytestmark = pytest.mark.usefixtures("feedapi", "short_waits")


@pytest.fixture
def publisher(feedapi_publisher_factory: Make) -> Publisher:
    publisher = feedapi_publisher_factory(2, page_size=10, checkpoint_every=5)
    publisher.extend(0, [{"n": n} for n in range(7)])
    publisher.extend(1, [{"m": n} for n in range(3)])
    return publisher


@pytest.fixture
def rows(publisher: Publisher, store: Path, tmp_path: Path) -> Play:
    """Return a function that runs rows with these places."""
    places = {
        "URL": publisher.url,
        "STORE": store,
        "FILE": tmp_path / "cursors.json",
        "OTHER": tmp_path / "other.db",
        "EMPTY": tmp_path / "empty.db",
        "KEYED": FeedKey("http://old/x?t=1").url,
        "END0": publisher.end_cursor(0),
        "END1": publisher.end_cursor(1),
    }
    (tmp_path / "empty.db").touch()
    return lambda *rows, **more: play(rows, **(places | more))


@pytest.fixture
def filled(rows: Play, store: Path) -> Path:
    """The store of a consumer that has read everything."""
    rows(Row("cat URL --store STORE"))
    return store


def key(publisher: Publisher, name: str = "default") -> FeedKey:
    return FeedKey(str(publisher.url), name)


def stored(store: Path, of: FeedKey) -> Stand:
    async def load() -> Stand:
        async with SQLiteCursorStore(store) as cursors:
            return stand(await cursors.load(of))

    return anyio.run(load)


def save(store: Path, of: FeedKey, positions: Mapping[int, Position]) -> None:
    async def replace() -> None:
        async with SQLiteCursorStore(store) as cursors:
            await cursors.replace(of, positions)

    anyio.run(replace)


def exported(feedapi: Feedapi, store: object, *args: object) -> list[dict[str, Any]]:
    feeds: list[dict[str, Any]] = orjson.loads(
        feedapi("cursors", "export", "--store", store, *args).stdout
    )["feeds"]
    return feeds


# ---------------------------------------------------------------------- a table a command

SKIP = "cursors skip URL --store STORE --name new"
RESTORE = "cursors restore URL --store STORE"
SELECT = "cursors move URL URL --store STORE --name app --selection"
ONE = shlex.quote('{"filter-n":"1"}')
CASES = {
    "ls": [
        Row(
            "cursors ls --store STORE", says="default @ URL\npartition\tstatus\trevision\tcursor\n"
        ),
        Row("cursors ls --store STORE -p 1", says="1\topen\t"),
        Row("cursors ls http://elsewhere/feed --store STORE", 1, "no positions of such a feed"),
        Row("cursors ls --lag --store STORE", 2, "--lag asks the feed: give its "),
        Row("cursors ls", 2, "give --store, or --checkpoint"),
    ],
    "show": [
        Row("cursors set 5 abc URL --store STORE --name other"),
        Row("cursors show --store STORE", 1, "choose by FEED and --name"),
        Row("cursors show --store STORE --name other", says="5\topen\t"),
        Row("cursors show --store STORE --name nobody", 1, "no positions of such a feed"),
    ],
    "a store is not created to be read": [
        *[Row("cursors ls --store OTHER", 1, "feedapi: OTHER: there is no such file\n")] * 2,
        *[Row("cursors ls --store EMPTY", 1, "holds no cursors")] * 2,
        Row("cat URL --store OTHER"),
        Row("cursors ls --store OTHER", says="0\topen\t"),
        Row("cursors ls --store env:NOT_SET_ANYWHERE", 2, "NOT_SET_ANYWHERE"),
    ],
    "set": [
        Row(
            "cursors set 0 _first --store STORE",
            says="=default @ URL: partition 0 is at '_first'\n",
        ),
        Row("cat URL --store STORE --format %i", says="=1234567"),
    ],
    "set for a feed that the store does not know": [
        Row("cursors set 0 END0 URL --store OTHER --name me"),
        Row("cat URL --store OTHER --name me --format %p", says="=111"),
        Row("cursors set 0 c http://h/feed --store OTHER --filter a=b"),
        Row("cursors export http://h --store OTHER", says='"filter-a": "b"'),
    ],
    "set of one feed": [
        Row("cat URL --store STORE --name other"),
        Row("cursors set 0 _first --store STORE", 1, "choose by FEED and --name"),
        Row("cursors set 0 _first --store STORE --name other"),
    ],
    "reset": [
        Row("cursors reset --store STORE", 1, "forget 2 positions?", "n\n"),
        Row("cursors reset --store STORE", 1, "aborted", ""),
        Row("cursors reset --store STORE -p 0 --yes", says="1 position forgotten\n"),
        Row("cursors reset --store STORE -p 0 --yes", 1, "nothing is stored for partition 0"),
        Row("cursors reset --store STORE", says="forget 1 position?", input="y\n"),
        Row("cursors ls --store STORE", says="=no positions are stored\n"),
    ],
    "import": [
        Row("cursors import FILE --store OTHER", says="default @ URL: 2 positions imported\n"),
        Row("cat URL --store OTHER", says="="),
        Row("cursors import FILE --store OTHER", 1, "Replace 2 positions", "n\n"),
        Row("cursors import FILE --store OTHER --yes"),
        Row("cursors import none.json --store OTHER", 1, "none.json: No such file or directory"),
    ],
    "rewind without a journal": [
        Row("cursors rewind --to '2 hours ago' --store STORE --yes", 1, "keeps no journal")
    ],
    "a database given by URL": [
        Row("cat URL --store DATABASE", says="="),
        Row("cursors ls --store DATABASE", says="0\topen\t"),
        Row("cursors set 0 _first --store DATABASE"),
        Row("cursors ls --store DATABASE --table nothing", 1, "no table nothing"),
    ],
    "skip": [
        Row(f"{SKIP} --dry-run", says="10 events skipped, 2 positions saved"),
        Row(f"{SKIP} -p 0 --dry-run", says="7 events skipped, 1 position saved (dry run"),
        Row(f"{SKIP} -p 0", says="7 events skipped, 1 position saved"),
        Row("cursors ls --store STORE --name new --json", says="END0"),
        Row(SKIP, says="=new @ URL: 3 events skipped, 1 position saved\n"),
        Row("cat URL --store STORE --name new", says="="),
        Row(SKIP, says="=new @ URL: 0 events skipped, 0 positions saved\n"),
    ],
    "skip without the name": [
        Row("cursors rename default app --store STORE"),
        Row("cursors skip URL --store STORE", 1, "but of app: give --name"),
        Row("cursors ls --store STORE --name default", 1, "no positions"),
        Row("cursors skip URL --store STORE --force", says="10 events skipped"),
    ],
    "drain": [
        Row("cursors drain URL 0 --store STORE --yes", 1, "partition 0 is open"),
        Row("cursors drain URL 9 --store STORE --yes", 1, "neither listed by the feed nor stored"),
        Row("cursors drain URL 9 --store STORE --yes --force", says="partition 9 is drained\n"),
        Row(
            "cursors drain URL 0 --store STORE --yes --force --name typo", 1, "no cursor is stored"
        ),
        Row("cursors drain URL 0 --store STORE --force", 1, "skip what was not read?", "n\n"),
        Row("cursors drain URL 0 --store STORE --force", says="is drained", input="y\n"),
        Row("cursors drain URL 0 --store STORE", says="partition 0 is drained already\n"),
        Row("cursors set 0 x --status superseded --store STORE"),
        Row("cursors drain URL 0 --store STORE --yes --force", 1, "superseded"),
    ],
    "move": [
        Row(
            "cursors move URL http://old/x?t=1 --store STORE", says="default @ http://old/x#sha256="
        ),
        Row(
            "cursors move http://typo/x http://new/x --store STORE",
            1,
            "no cursors of http://typo/x",
        ),
        Row("cursors move http://a/x HTTP://A/x --store STORE", 2, "have the same cursors"),
        Row("cursors move KEYED URL --store STORE --name nobody", 1, "no cursors"),
        Row("cursors set 7 c URL --store STORE --name default"),
        Row("cursors move http://old/x?t=1 URL --store STORE", 1, "--overwrite"),
        Row("cursors move KEYED URL --store STORE --overwrite", says="2 positions moved"),
        Row("cat URL --store STORE", says="="),
    ],
    "move to another selection": [
        Row("cursors reset --store STORE --yes"),
        Row("cursors set 0 all URL --store STORE --name app"),
        Row("cursors set 0 c URL --store STORE --name app --filter n=1"),
        Row(f"{SELECT} {ONE} a", 2, "two JSON objects"),
        Row(f"{SELECT} {{}} {{}}", 2, "same cursors"),
        Row(f"{SELECT} {ONE} {{}}", 1, "--overwrite"),
        Row(
            f"{SELECT} {ONE} {ONE.replace('1', '2')}",
            says="=app @ URL filter-n=2: 1 position moved here\n",
        ),
        Row(f"{SELECT} {ONE} {{}}", 1, "holds no cursors"),
        Row("cursors ls --store STORE --json", says='"cursor": "all"'),
    ],
    "restore": [
        Row("cursors set 0 60 --status superseded --store STORE"),
        Row("cursors set 10 80 --store STORE"),
        Row(f"{RESTORE} 0", 1, "partition 0 at '80', which partition 10 held?", "n\n"),
        Row(f"{RESTORE} 0 --name typo --yes", 1, "no cursor is stored"),
        Row(f"{RESTORE} 0 --cursor ä", 2, "printable ASCII"),
        Row(f"{RESTORE} 7 --yes", 1, "does not list it"),
        Row("cursors set 11 75 --store STORE"),
        Row(f"{RESTORE} 0 --yes", 1, "10 at '80', 11 at '75'"),
        Row(f"{RESTORE} 0 --successor 10 --successor 11 --cursor 75 --yes", says="at '75'"),
        Row("cursors ls --store STORE -p 0", says="0\topen\t"),
        Row("cursors ls --store STORE -p 11", says="11\tsuperseded\t"),
    ],
    "rename": [
        Row("cat URL --store STORE --name taken"),
        Row("cursors rename default taken --store STORE", 1, "there are cursors already"),
        Row("cursors rename nobody new --store STORE", 1, "of a consumer nobody"),
        Row("cursors rename default default --store STORE", 2, "another name"),
        Row("cursors rename default new http://elsewhere --store STORE", 1, "of http://elsewhere"),
        Row("cursors rename default new --store STORE", says="2 positions renamed\n"),
        Row("cat URL --store STORE --name new", says="="),
    ],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("filled")
def test_commands(rows: Play, feedapi: Feedapi, store: Path, tmp_path: Path, case: str) -> None:
    export = feedapi("cursors", "export", "--store", store).stdout_bytes
    (tmp_path / "cursors.json").write_bytes(export)
    rows(*CASES[case], DATABASE=f"sqlite+aiosqlite:///{store}")


def test_ls_and_show_print_what_export_does_as_json(
    feedapi: Feedapi, publisher: Publisher, filled: Path
) -> None:
    (feed,) = exported(feedapi, filled)
    assert (feed["url"], feed["name"], feed["filters"]) == (publisher.url, "default", {})
    ids = [(row["partition"], row["cursor"], row["status"]) for row in feed["positions"]]
    assert ids == [(id, publisher.end_cursor(id), "open") for id in (0, 1)]
    for command in ("ls", "show"):
        printed = feedapi("cursors", command, "--store", filled, "--json").stdout
        assert orjson.loads(printed)["feeds"] == [feed]


def test_ls_shows_the_lag_of_each_partition(rows: Play, publisher: Publisher, filled: Path) -> None:
    publisher.append(1, {"m": 3})
    publisher.split(0, into=(6,), method="starts-after")
    listed = rows(Row("cursors ls URL --lag --store STORE --json", says='"lag": "behind"')).stdout
    lags = [row["lag"] for row in orjson.loads(listed)["feeds"][0]["positions"]]
    assert lags == ["caught up", "behind", "not begun, starts after 0"]
    publisher.fail(503, partition=0, times=None)
    rows(Row("cursors ls URL --lag --store STORE", says="\tunknown (FeedUnavailableError)\n"))
    publisher.heal()
    publisher.fail(403, partition=0, times=None)
    rows(Row("cursors ls URL --lag --store STORE", 1, "403"))


@contextmanager
def meddling(publisher: Publisher, *words: object) -> Iterator[None]:
    """Run a command while the next request is answered, in a process of its own."""

    def meddle(response: Any, request: Any, publisher: Publisher) -> Any:
        command = [sys.executable, "-m", "feedapi_client.cli", *map(str, words)]
        subprocess.run(command, check=True, capture_output=True)
        return response

    publisher.fail(meddle, times=1)
    yield


@pytest.mark.parametrize("command", ["cat", "cursors skip"])
def test_r17_set_fences_a_running_consumer_and_a_skip(
    rows: Play, publisher: Publisher, filled: Path, command: str
) -> None:
    publisher.append(0, {"n": 7})
    with meddling(publisher, "cursors", "set", 0, "elsewhere", "--store", filled):
        rows(Row(f"{command} URL --store STORE", 1, "another consumer", input=""))
    assert stored(filled, key(publisher))[0] == ("elsewhere", "open")


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16"])
def test_import_reads_what_another_program_saved(
    feedapi: Feedapi, publisher: Publisher, filled: Path, tmp_path: Path, coding: str
) -> None:
    text = feedapi("cursors", "export", "--store", filled).stdout
    (tmp_path / "backup.json").write_bytes(text.replace("\n", "\r\n").encode(coding))
    other = tmp_path / "other.db"
    assert not feedapi("cursors", "import", tmp_path / "backup.json", "--store", other).exit_code
    assert stored(other, key(publisher)) == stored(filled, key(publisher))
    save(other, key(publisher), {0: Position("_first")})
    assert not feedapi("cursors", "import", "-", "--store", other, input=text).exit_code
    assert stored(other, key(publisher)) == stored(filled, key(publisher))


# ---------------------------------------------------------------------- rewind


def test_rewind_takes_the_consumer_back(rows: Play, journalled_store: Path) -> None:
    before = datetime.now(UTC)
    time.sleep(0.01)
    rows(Row("cat URL --store STORE"))
    between = datetime.now(UTC)
    time.sleep(0.01)
    told = rows(
        Row("cursors set 1 x --store STORE"),
        Row("cursors rewind --to TIME --store STORE --dry-run", says="2 positions rewound to"),
        Row("cursors rewind --to TIME --store STORE", 1, "rewind 2 positions to", "n\n"),
        Row("cursors ls --store STORE", says="\tx\n"),
        Row("cursors rewind --to TIME --store STORE --yes", says="2 positions rewound to"),
        Row("cursors ls --store STORE", says="\tEND1\n"),
        Row("cursors rewind --to BEFORE --store STORE --dry-run", 1, "reset' begins anew"),
        Row("cursors rewind --to '2 hours ago' --store STORE --yes", 1, "reset' begins anew"),
        TIME=between.isoformat(),
        BEFORE=before.isoformat(),
    ).stderr
    begin = told.partition("The journal knows positions from ")[2].partition(" on. ")[0]
    assert abs(datetime.fromisoformat(begin) - between) < timedelta(hours=1)


def test_a_redis_given_by_url(rows: Play, redis_server: Redis) -> None:
    rows(
        Row("cat URL --store REDIS"),
        Row("cursors export --store REDIS", says="END0"),
        Row("cursors rewind --to now --store REDIS --yes", 2, "keeps no journal"),
        REDIS=redis_server.url,
    )


# ---------------------------------------------------------------------- by what the feed says


def test_r7_skip_is_the_way_out_when_last_has_no_cursor(
    rows: Play, publisher: Publisher, store: Path
) -> None:
    def refuse_last(response: Any, request: Any, publisher: Publisher) -> Any:
        assert request.query.get("cursor") != "_last"
        return response

    publisher.split(0, into=(2,), method="starts-after")
    publisher.split(1, into=(4,), method="cursor-from")
    publisher.extend(4, [{"n": 1}])
    publisher.fail(refuse_last, times=None)
    rows(Row("cursors skip URL --store STORE"))
    found = stored(store, key(publisher))
    assert {id: status for id, (_, status) in found.items() if id != 1} == {
        0: "drained",
        2: "open",
        4: "open",
    }
    publisher.append(2, {"n": "new"})
    rows(
        Row("cat URL --store STORE --from last --format %s", says='={"n":"new"}'),
        Row("cursors restore URL 0 --store STORE --yes", 1, "lists it as closed"),
    )


def test_a_skip_that_fails_saves_nothing(rows: Play, publisher: Publisher, store: Path) -> None:
    publisher.fail(403, partition=1, times=None)
    rows(Row("cursors skip URL --store STORE", 1, "403"))
    assert stored(store, key(publisher)) == {}


def test_skip_shows_progress_on_a_terminal(
    on_terminal: OnTerminal, publisher: Publisher, store: Path
) -> None:
    code, shown = on_terminal("stderr", "cursors", "skip", publisher.url, "--store", store)
    assert (code, "10 events" in shown) == (0, True)


@pytest.mark.parametrize("command", ["cat", "run"])
def test_r07_a_start_beside_the_cursors_of_the_same_feed_is_refused(
    rows: Play, publisher: Publisher, filled: Path, command: str
) -> None:
    """The message names the command that goes on; --from first is for who means it."""
    old = f"https://former.test/{str(publisher.url).split('/', 3)[3]}"
    run = " --no-follow --handler tests.cli.test_cursors:handle" if command == "run" else ""
    start, move = f"{command} URL --store STORE{run}", "cursors move OLD URL --name default"
    rows(
        Row("cursors move URL OLD --store STORE"),
        Row(start, 1, f"feedapi {move}", input=""),  # run writes log records, too
        Row(f"{move} --store STORE"),
        Row(start),
        Row("cursors move URL OLD --store STORE"),
        Row(f"{start} --from first"),
        OLD=old,
    )
    assert stored(filled, key(publisher)).keys() == {0, 1}


async def handle(batch: object) -> None:
    """For ``feedapi run``."""


# ---------------------------------------------------------------------- beside other instances


@pytest.fixture
def shared(publisher: Publisher, store: Path) -> Path:
    """The store of an instance that is alive, and one that is dead and has no partition."""
    of = key(publisher)
    publisher.split(1, into=(2, 3), method="starts-after")

    async def fill() -> None:
        async with SQLiteCursorStore(store, journal=Journal()) as cursors:
            await cursors.save(of, {0: Position("_first"), 1: Position("_first")})
            alive = "alive\x1b[31m"
            await cursors.beat(of, "dead", 0.05)
            await cursors.beat(of, alive, 1000)
            await cursors.put(of, alive, claims(alive, dict.fromkeys((-1, 0, 1, 3), 0)))
            await cursors.put(of, alive, [Lease(3, None, 1)])
            while sum(each.alive for each in (await cursors.look(of)).instances) > 1:  # noqa: ASYNC110
                await anyio.sleep(0.001)

    anyio.run(fill)
    return store


CHANGES = {
    "set": "cursors set 0 c5 --store STORE",
    "reset": "cursors reset --store STORE --yes",
    "import": "cursors import FILE --store STORE --yes",
    "rewind": "cursors rewind --to NOW --store STORE --yes",
    "skip": "cursors skip URL --store STORE --quiet",
    "drain": "cursors drain URL 1 --store STORE --yes",
    "rename": "cursors rename default new --store STORE",
    "move": "cursors move URL http://elsewhere.test/feed --store STORE",
}


@pytest.fixture
def prepared(rows: Play, feedapi: Feedapi, shared: Path, tmp_path: Path) -> Play:
    """The same as `rows`, with an export of the present positions, and their time."""
    export = feedapi("cursors", "export", "--store", shared).stdout_bytes
    (tmp_path / "cursors.json").write_bytes(export)
    now = datetime.now(UTC).isoformat()
    return lambda *given: rows(*given, NOW=now)


def ids(result: Invoked) -> list[list[int]]:
    feeds = orjson.loads(result.stdout)["feeds"]
    return [[row["partition"] for row in feed["positions"]] for feed in feeds]


@pytest.mark.parametrize("command", CHANGES)
def test_what_changes_positions_refuses_beside_a_living_instance_and_may_be_tried(
    prepared: Play, publisher: Publisher, shared: Path, command: str
) -> None:
    of, words = key(publisher), CHANGES[command]
    before = stored(shared, of)
    prepared(
        Row(words, 1, "shared by 1 living instance (alive\\x1b[31m), to be stopped"),
        Row(words, 1, "--force"),
    )
    words += " --force"
    prepared(Row(f"{words} --dry-run", says="(dry run: nothing is changed)\n"))
    planned = ids(prepared(Row(f"{words} --dry-run --json")))
    assert stored(shared, of) == before
    assert ids(prepared(Row(f"{words} --json"))) == planned
    assert planned != [[]]
    if command not in ("import", "rewind"):  # of what is stored
        assert stored(shared, of) != before


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("reset", {1: "c5"}),
        ("import", {0: "_first", 1: "c5", 7: "c5"}),
        ("rewind", {0: "_first", 1: "c5"}),
        ("move", {1: "c5"}),
        ("rename", {1: "c5"}),
    ],
)
def test_a_change_of_some_partitions_leaves_the_others(
    prepared: Play, publisher: Publisher, shared: Path, command: str, left: dict[int, str]
) -> None:
    prepared(*(Row(f"cursors set {id} c5 --store STORE --force") for id in (0, 1, 7)))
    planned = ids(prepared(Row(f"{CHANGES[command]} -p 0 -p 7 --force --dry-run --json")))
    assert ids(prepared(Row(f"{CHANGES[command]} -p 0 -p 7 --force --json"))) == planned
    found = stored(shared, key(publisher))
    assert {id: cursor for id, (cursor, _) in found.items()} == left
    assert [1] in ids(prepared(Row("cursors ls --store STORE -p 1 --json")))


def test_what_only_reads_is_never_refused(prepared: Play) -> None:
    prepared(
        Row("cursors restore URL 0 --store STORE --yes", 1, "1 living instance"),
        Row("cursors restore URL 0 --store STORE --yes --force", 1, "nothing to restore"),
        Row("cursors ls --store STORE"),
        Row("cursors export --store STORE"),
        Row("cursors rewind --to NOW --store STORE --dry-run"),
    )


def test_leases_ls_shows_instances_with_age_and_load(
    feedapi: Feedapi, rows: Play, shared: Path, tmp_path: Path
) -> None:
    result = rows(Row("leases ls --store STORE", says="default @ URL"))
    assert "\x1b" not in result.stdout
    alive, dead, nobody = (line.split("\t") for line in result.stdout.splitlines()[2:])
    assert (alive[1], alive[3], dead[0], dead[3]) == ("alive", "2", "dead", "0")
    assert re.fullmatch(r"0 \(\d+ s\), 1 \(\d+ s\)", alive[4])
    assert (dead[1].startswith("dead for"), nobody[1]) == (True, "nobody")
    (feed,) = orjson.loads(rows(Row("leases ls --store STORE --name default --json")).stdout)[
        "feeds"
    ]
    assert [one["alive"] for one in feed["instances"]] == [True, False]
    held = [(lease["partition"], lease["instance"] is None) for lease in feed["leases"]]
    assert held == [(0, False), (1, False), (3, True)]
    rows(
        Row("leases ls --store STORE --name x", 1, "no positions of such a feed"),
        Row("cat URL --store OTHER"),
        Row("leases ls --store OTHER", says="no instances share a feed"),
    )
