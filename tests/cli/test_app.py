"""What all commands share: help, the environment, exit codes, credentials, extras."""

from __future__ import annotations

import builtins
import re
import shlex
import subprocess
import sys
import time as clock
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest

from feedapi_client import RetryPolicy, __version__
from feedapi_client.cli.command import EXIT_CODES, REMOVED
from feedapi_client.cli.options import Connection
from feedapi_client.cli.options import time as parse_time
from feedapi_client.client import FeedClient
from feedapi_client.errors import StoreError
from feedapi_client.testing import Publisher, Response
from tests.cli.conftest import Feedapi
from tests.cli.invoke import LEAVES, Row, play
from tests.docs.snippets import PAGES_FOLDER
from tests.http.certificates import self_signed, serve_https

NOBODY = "http://127.0.0.1:9/feed"


@pytest.fixture(autouse=True)
def _here(feedapi: Feedapi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.pem").touch()


async def handle(batch: object) -> None:
    """For ``feedapi run``."""


HANDLER = "--handler tests.cli.test_app:handle"

# ---------------------------------------------------------------------- help


def test_help_lists_the_commands_and_the_exit_codes_as_the_documentation_does(
    feedapi: Feedapi,
) -> None:
    text = " ".join(feedapi("--help").stdout.split())
    assert {words.split()[0] for words in LEAVES} <= set(text.split())
    assert all(f"{code} {meaning}" in text for code, meaning in EXIT_CODES.items())
    page = (PAGES_FOLDER / "command-line.md").read_text(encoding="utf-8").partition("## Exit codes")
    rows = re.findall(r"^\| (\d[\d, ]*) \| (.+) \|$", page[2], re.MULTILINE)
    assert rows == list(EXIT_CODES.items())
    assert "3 when the handler failed" in " ".join(feedapi("run", "--help").stdout.split())
    assert "upgrade" not in feedapi("cursors", "--help").stdout


EXAMPLES = {
    name: (leaf.epilog or "").split("\n\n")[0].split("\n")[2:] for name, leaf in LEAVES.items()
}


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_help_fits_80_columns_and_has_examples_that_can_be_parsed(
    feedapi: Feedapi, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "Bearer sesame")
    text = " ".join(feedapi(*name.split(), "--help").stdout.split())
    assert EXAMPLES[name]
    for example in EXAMPLES[name]:
        assert " ".join(example.split()) in text
        words = shlex.split(example.partition(" > ")[0].removeprefix(f"feedapi {name}"))
        LEAVES[name].make_context(name, words)  # raises for what the command does not take
    monkeypatch.setenv("COLUMNS", "80")
    lines = feedapi(*name.split(), "--help").stdout.splitlines()
    assert [line for line in lines if len(line) > 80 or "<bool>" in line] == []


@pytest.mark.parametrize("command", ["", "cursors", "cat", "discover", "ingest", "relay", "run"])
def test_help_imports_nothing_that_only_another_command_needs(command: str) -> None:
    heavy = (
        *("httpx", "anyio", "grpc", "sqlalchemy", "redis", "pyspark", "nats", "rich.live"),
        *("uvicorn", "feedapi_client.testing.publisher"),
    )
    program = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from feedapi_client.cli.app import app\n"
        f"sys.argv = ['feedapi', *{command.split()!r}, '--help']\n"
        "with suppress(SystemExit):\n    app(prog_name='feedapi')\n"
        "print(*[name for name in sys.modules if name.startswith('feedapi_client.cli.')])\n"
        f"print(*[name for name in {heavy!r} if name in sys.modules])"
    )
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    *_, modules, loaded = done.stdout.splitlines()
    own = {name.removeprefix("feedapi_client.cli.") for name in modules.split()}
    if command:
        assert own - {"app", "command", "options", "terminal"} == {command}
        assert loaded == ""


def test_version_and_a_command_line_without_a_command(feedapi: Feedapi) -> None:
    assert feedapi("--version").stdout == f"feedapi {__version__}\n"
    result = feedapi()
    assert (result.exit_code, result.output.count("Usage:")) == (2, 1)


# ---------------------------------------------------------------------- a wrong command line

WRONG = [
    Row("bogus", 2, "No such command 'bogus'"),
    Row("cat", 2, "Missing argument"),
    Row("discover", 2, "Missing argument"),
    Row("discover ftp://feed", 2, "must begin with http:// or https:// and name a host"),
    Row("discover localhost:8080/feed", 2, "must begin with http:// or https://"),
    Row(f"cat {NOBODY} --bogus", 2, "No such option: --bogus"),
    Row(f"cat {NOBODY} --limit 0", 2, "--limit"),
    Row(f"cat {NOBODY} --filter a", 2, "takes NAME=VALUE"),
    Row(f"discover {NOBODY} --auth-env NOT_SET_ANYWHERE", 2, "NOT_SET_ANYWHERE is not set"),
    Row("serve --dialect v3", 2, "v3"),
    Row("serve --dialect v1 --split-every 1", 2, "no splits"),
    Row("demo --instances 2 --sabotage cursor-last", 2, "one instance"),
    Row("cursors rewind --to 'the day before' --store x", 2, "is no time"),
    Row("cursors set 0 'a b\x07' --store x", 2, "printable ASCII"),
    Row(f"relay {NOBODY} --nonsense", 2, " relay --help says more)\n"),
    Row(f"ingest {NOBODY} --nonsense", 2, " ingest --help says more)\n"),
    Row(f"doctor {NOBODY} --key client.key", 2, "--cert-key goes with --cert"),
    Row(f"doctor {NOBODY} --cert missing.pem", 2, "no certificate with its key"),
    Row(f"doctor {NOBODY} --oauth-client-id me", 2, "go together"),
    *(
        Row(f"{command} --store FOLDER", 2, "--store: FOLDER is a folder: name a file in it")
        for command in (f"cat {NOBODY}", f"run {NOBODY} {HANDLER}")
    ),
    Row(
        f"relay {NOBODY} --stream s --store c.db --oversized quarantine --quarantine FOLDER",
        2,
        "--quarantine: FOLDER is a folder",
    ),
    Row("quarantine replay --all --handler nothing:handle --store c.db", 2, "can't be imported"),
    *(
        Row(f"{command} --lineage={value}", 2, "--lineage")
        for command in (f"cat {NOBODY}", f"discover {NOBODY}")
        for value in ("1", "1:", "a:b", "1:40000", "1:0:2", "-1:0", "''")
    ),
    *(
        Row(f"{command} --ca-file {file}.pem", 2, "holds no certificates")
        for command in (
            f"cat {NOBODY}",
            f"discover {NOBODY}",
            f"doctor {NOBODY}",
            f"run {NOBODY} {HANDLER} --store c.db",
            f"relay {NOBODY} --stream s --store c.db",
            f"ingest {NOBODY} out",
        )
        for file in ("absent", "empty")
    ),
    Row(f"discover {NOBODY} --give-up-after 0", 1, f"feedapi: feed {NOBODY}: "),
    Row(f"doctor {NOBODY}", 69, f"feed {NOBODY}: "),
    Row("status 127.0.0.1:1/app", 1, "no monitor answers at 127.0.0.1:1: "),
    Row(f"doctor {NOBODY} --ignore nonsense", 2, "there is no check nonsense"),
    Row(f"doctor {NOBODY} --ignore lineage-string", 2, "lineage-string: it is a part of id-text"),
    *(
        Row(f"{words} {number}", 2, words.rpartition(" ")[2])
        for words, number in (
            (f"discover {NOBODY} --give-up-after", "nan"),
            (f"discover {NOBODY} --give-up-after", "inf"),
            (f"discover {NOBODY} --v1-partitions", 99999999999),
            (f"cat {NOBODY} --partition", 32768),
            ("serve --rate", "inf"),
            ("serve --split-every", "nan"),
            ("demo --seconds", "nan"),
            ("cursors reset --store x -p", -1),
            ("quarantine ls --store x -p", 40000),
            ("quarantine replay --store x --all --handler", ":f"),
        )
    ),
]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.words)
def test_what_is_wrong_is_reported_on_one_line_with_its_exit_code(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    play([row._replace(words=row.words.replace("FOLDER", str(tmp_path)))], FOLDER=tmp_path)


USED = {
    "cat --format %k": f"cat {NOBODY} --format %k",
    "cat --format %K": f"cat {NOBODY} --format %K",
    "cat --from TIME": f"cat {NOBODY} --store c.db --from 14:30",
    "cursors --feed": "cursors reset --store c.db --feed http://h/f",
    "cursors upgrade": "cursors upgrade --store c.db",
    "leases --feed": "leases ls --store c.db --feed http://h/f",
    "quarantine --feed": "quarantine drop --all --store c.db --feed http://h/f",
    "run --start": "run --start first",
}


@pytest.mark.parametrize("option", REMOVED)
def test_an_option_that_is_gone_names_its_successor(option: str) -> None:
    gone = option.rpartition(" ")[2]
    play([Row(USED.get(option, option), 2, f"{gone} is gone: {REMOVED[option]} (feedapi ")])


SECRETS = [
    f"discover {NOBODY} --header-env X-Api-Key=hunter2-secret",
    f"discover {NOBODY} --header-env 'X-Api-Key: hunter2-secret'",
    f"discover {NOBODY} --auth-env 'Bearer hunter2-secret'",
    f"relay {NOBODY} --stream s --store x.db --nats-env nats://me:hunter2@host",
    f"relay {NOBODY} --stream s --store x.db --api h:9 --api-tls --api-token-env hunter2-token",
    "cursors ls --store env:postgresql://me:hunter2@host/db",
    "cursors ls --store liftbridges://broker:1/orders?token_env=hunter2-token",
]


@pytest.mark.parametrize("words", SECRETS)
def test_r19_a_secret_in_the_place_of_a_variable_is_not_repeated(
    feedapi: Feedapi, words: str
) -> None:
    result = feedapi(*shlex.split(words))
    assert result.exit_code in (1, 2)
    assert "hunter2" not in result.output
    assert "environment variable" in " ".join(result.stderr.split())


def test_r19_an_internal_error_is_one_line_without_its_text_unless_it_is_asked_for(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a payload with a secret")

    monkeypatch.setattr(FeedClient, "discover", broken)
    said = "feedapi: internal error: KeyError (set FEEDAPI_DEBUG=1 to see where)\n"
    play([Row(f"discover {NOBODY}", 70, said)])
    monkeypatch.setenv("FEEDAPI_DEBUG", "1")
    assert isinstance(feedapi("discover", NOBODY).exception, KeyError)


def test_a_command_that_asks_once_gives_up_soon(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal after 5 seconds, a feed that can't be reached after 10."""
    asked = []

    def record(*_: object, retry: RetryPolicy, **__: object) -> None:
        asked.append((retry.refused_for, retry.give_up_after))
        raise StoreError("enough is known")

    monkeypatch.setattr("feedapi_client.operations.feed_access.FeedConsumer", record)
    monkeypatch.setattr("feedapi_client.FeedClient", record)
    for command in ("discover", "cat", "cat --give-up-after 3", "cat --follow"):
        play([Row(f"{command} {NOBODY}", 1, "enough is known")])
    play([Row(f"cursors skip {NOBODY} --store c.db", 1, "enough is known")])
    assert asked == [(5, 10), (5, 10), (5, 3), (RetryPolicy().refused_for, None), (5, 10)]


# ---------------------------------------------------------------------- the environment


def test_options_have_the_variables_that_the_help_says() -> None:
    for each in (*LEAVES["run"].params, *LEAVES["relay"].params):
        named = each.opts[0] if each.param_type_name == "option" else each.metavar
        assert each.envvar == "_".join(["FEEDAPI", *re.findall(r"\w+", named)]).upper()
    variables = {"url": "FEEDAPI_URL", "store": "FEEDAPI_STORE", "name": "FEEDAPI_NAME"}
    variables["v1_partitions"] = "FEEDAPI_V1_PARTITIONS"
    others = [
        (words, each.name)
        for words, leaf in LEAVES.items()
        for each in leaf.params
        if each.name in variables and each.envvar != variables[each.name]
    ]
    assert others == []


def test_a_feed_of_the_environment_leaves_the_other_arguments_their_places(
    feedapi_publisher: Publisher, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedapi_publisher.append(0, {"n": 1})
    monkeypatch.setenv("FEEDAPI_URL", feedapi_publisher.url or "")
    monkeypatch.setenv("MY_DATABASE", str(store))
    monkeypatch.setenv("FEEDAPI_STORE", "env:MY_DATABASE")
    monkeypatch.setenv("FEEDAPI_NAME", "me")
    play(
        [Row("cat"), Row("cursors drain 0 --yes --force", says="me @ URL: partition 0 is drained")],
        URL=feedapi_publisher.url,
    )


# ---------------------------------------------------------------------- times

NOW = datetime(2031, 5, 4, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2 hours ago", NOW - timedelta(hours=2)),
        ("1 hour ago", NOW - timedelta(hours=1)),
        ("an hour ago", NOW - timedelta(hours=1)),
        ("90min ago", NOW - timedelta(minutes=90)),
        ("1h30m ago", NOW - timedelta(minutes=90)),
        ("1 day, 6 hours and 30 seconds ago", NOW - timedelta(days=1, hours=6, seconds=30)),
        ("1.5 days ago", NOW - timedelta(hours=36)),
        ("2 Weeks Ago", NOW - timedelta(weeks=2)),
        ("now", NOW),
        ("2031-05-04T10:30:00Z", NOW - timedelta(minutes=90)),
        ("2031-05-04T10:30:00+02:00", NOW - timedelta(minutes=210)),
        ("2031-05-04 10:30", datetime(2031, 5, 4, 10, 30).astimezone()),
        ("10:30", NOW.astimezone().replace(hour=10, minute=30)),
        *(
            (text, None)
            for text in ("", "soon", "ago", "2 ago", "2 parsecs ago", "2 hours", "hours 2 ago")
        ),
        *((text, None) for text in ("25:00", "2031-13-01", "999999999999 weeks ago")),
    ],
)
def test_times_as_people_write_them(text: str, time: datetime | None) -> None:
    if time is not None:
        assert parse_time(text, NOW) == time
        return
    with pytest.raises(ValueError, match=r"time|range|unit"):
        parse_time(text, NOW)


@pytest.mark.parametrize(("day", "hour"), [("2026-10-25", 13), ("2027-03-28", 12)])
def test_a_time_of_today_is_local_also_when_the_clocks_changed_at_night(
    day: str, hour: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    clock.tzset()
    try:
        now = datetime.fromisoformat(f"{day}T{hour}:30+00:00")
        assert parse_time("1:30", now) == parse_time(f"{day}T01:30", now)
    finally:
        monkeypatch.undo()
        clock.tzset()


# ---------------------------------------------------------------------- who asks

ASKING = (
    "discover URL --KEY",
    "doctor URL --KEY",
    "cat URL --cert-KEY",
    "cat URL --store c.db --cert-KEY",
    f"run URL --no-follow {HANDLER} --store c.db --name run --KEY",
    "cursors ls --store c.db --lag URL --KEY",
    "cursors skip URL --store c.db --KEY",
)
"""Commands that ask the feed, and the option of the certificate's key in each."""
BY_KEY = f"run URL --no-follow {HANDLER} --store c.db --name by-key"


def test_every_command_that_asks_a_feed_takes_all_credentials() -> None:
    known = {field.name for field in fields(Connection)}
    asks = {words for words, leaf in LEAVES.items() if known <= {p.name for p in leaf.params}}
    cursors = {f"cursors {command}" for command in ("ls", "skip", "drain", "restore")}
    assert asks == {"discover", "doctor", "cat", "run", "relay", "status"} | cursors


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Callable[..., dict[str, object]]]:
    """Return a function that serves a feed over HTTPS, and gives its URL and the files."""
    publisher = Publisher(1)
    publisher.append(0, {"n": 1})
    server, client = self_signed(tmp_path, "127.0.0.1"), self_signed(tmp_path, "client.internal")
    with ExitStack() as stack:

        def serve(*, mutual: bool) -> dict[str, object]:
            clients = {"clients": client} if mutual else {}
            url = stack.enter_context(serve_https(publisher, server, **clients))
            return {"URL": url, "CA": server.path, "CERT": client.path, "KEYFILE": client.key}

        yield serve


def test_every_command_that_asks_a_feed_shows_a_certificate(
    secured: Callable[..., dict[str, object]],
) -> None:
    places = secured(mutual=True)
    play(
        [
            Row("discover URL --ca CA --give-up-after 0", 1, "certificate"),
            Row("doctor URL --ca-file CA --timeout 2", 69),
            *(
                Row(f"{words.replace('KEY', 'key')} KEYFILE --ca CA --cert CERT")
                for words in ASKING
            ),
            Row("discover URL --ca CA --cert CERT --cert-key KEYFILE"),
            Row(f"{BY_KEY} --ca CA --cert CERT --cert-key KEYFILE --key /n"),
        ],
        **places,
    )


def test_a_certificate_of_ones_own_is_trusted_with_ca_file(
    secured: Callable[..., dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = secured(mutual=False)
    play(
        [
            Row("discover URL", 1, "certificate can't be verified"),
            *(Row(f"{words.rpartition(' ')[0]} --ca-file CA") for words in ASKING),
        ],
        **places,
    )
    monkeypatch.setenv("FEEDAPI_CA_FILE", str(places["CA"]))
    play([Row("discover URL")], **places)


def test_every_command_that_asks_a_feed_sends_the_token_of_a_file(
    feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    feedapi_publisher.append(0, {"n": 1})
    feedapi_publisher.bearer = "of-the-file"
    (tmp_path / "token").write_text("of-the-file\n")
    places = {"URL": feedapi_publisher.url}
    play([Row("discover URL", 1, "401")], **places)
    for words in ASKING:
        row = Row(f"{words.rpartition(' ')[0]} --token-file token")
        assert "of-the-file" not in play([row], **places).output


def test_r19_credentials_of_the_environment_are_sent_and_not_shown(
    feedapi_publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedapi_publisher.bearer = "secret-token"
    monkeypatch.setenv("FEED_AUTH", "Bearer secret-token")
    monkeypatch.setenv("WRONG", "Bearer hidden-value")
    monkeypatch.setenv("ODD", "Bearer hidden-välue")
    outputs = [
        play([row], URL=feedapi_publisher.url).output
        for row in (
            Row("discover URL --auth-env FEED_AUTH"),
            Row("discover URL --header-env Authorization=FEED_AUTH"),
            Row("discover URL --auth-env WRONG", 1, "403"),
            Row("discover URL --auth-env ODD", 2, "not printable ASCII"),
        )
    ]
    assert not any("hidden" in output or "secret" in output for output in outputs)


def test_doctor_gets_a_token_by_client_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, tokens = Publisher(1, bearer="granted"), Publisher(1)
    grant = orjson.dumps({"access_token": "granted", "token_type": "bearer"})

    def token(*_: object) -> Response:
        return Response(200, {"content-type": "application/json"}, grant)

    tokens.fail(token, on="any", times=None)
    monkeypatch.setenv("SECRET", "s3cret")
    with publisher.serve() as url, tokens.serve() as token_url:
        words = f"doctor {url} --oauth-token-url {token_url} --oauth-client-id me"
        assert "s3cret" not in play([Row(f"{words} --oauth-secret-env SECRET")]).output


# ---------------------------------------------------------------------- extras


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[ImportError, str], None]:
    """Return a function that makes the import of a module fail."""
    real = builtins.__import__

    def forget(error: ImportError, module: str) -> None:
        def fail(
            name: str, scope: Any = None, local: Any = None, names: Any = (), level: int = 0
        ) -> Any:
            if level == 0 and name.partition(".")[0] == module:
                raise error
            return real(name, scope, local, names, level)

        monkeypatch.setattr(builtins, "__import__", fail)

    return forget


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("postgresql://h/db", "psycopg", "postgresql"),
        ("postgresql+asyncpg://h/db", "asyncpg", "asyncpg"),
        ("sqlite:///x.db", "aiosqlite", "sqlite"),
        ("mysql://h/db", "asyncmy", "mysql"),
        ("postgresql://h/db", "sqlalchemy", "postgresql"),
        ("mysql://h/db", "sqlalchemy", "mysql"),
        ("liftbridge://h:1/s", "nats", "liftbridge"),
    ],
)
def test_a_missing_module_names_the_extra_that_brings_it(
    without: Callable[[ImportError, str], None],
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    module: str,
    extra: str,
) -> None:
    # Only what can't be imported now: of a package that is imported twice, parts would stay.
    gone = {"nats": "feedapi_client.liftbridge", "sqlalchemy": "sqlalchemy"}.get(module, "?")
    for name in [name for name in sys.modules if name.startswith(gone)]:
        monkeypatch.delitem(sys.modules, name)
    without(ModuleNotFoundError(f"No module named {module!r}", name=module), module)
    said = f"pip install 'feedapi-client[{extra}]'"
    relay = f"relay {NOBODY} --stream s --store c.db"
    aside = f"{relay} --oversized quarantine --quarantine {url}"
    play(
        [
            Row(f"cursors ls --store {url}", 1, said),
            Row(relay if module == "nats" else aside, 1, said),
        ]
    )


def test_r19_a_driver_that_can_not_be_loaded_is_named_without_secrets(
    without: Callable[[ImportError, str], None],
) -> None:
    without(ImportError("libssl.so.3: cannot open shared object file"), "asyncmy")
    result = play([Row("cursors ls --store mysql://user:hunter2@h/db", 1, "libssl.so.3")])
    assert "hunter2" not in result.output


@pytest.mark.anyio
async def test_one_authorization_is_sent() -> None:
    given = {"authorization": "b", "X": "c"}
    async with Connection(auth_env="Bearer a", header_env=given).client() as http:
        assert http is not None
        sent = [http.headers.get_list(name) for name in ("authorization", "x")]
    assert sent == [["Bearer a"], ["c"]]


def test_without_the_extra_cli_the_command_says_what_to_install() -> None:
    code = "import sys\nsys.modules['typer'] = None\nfrom feedapi_client.cli import main\nmain()"
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, check=False, capture_output=True, text=True)
    said = "feedapi: typer is not installed: pip install 'feedapi-client[cli]'\n"
    assert (result.returncode, result.stderr) == (1, said)


def test_the_help_of_each_command_is_drawn(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "docs" / "help_pictures.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    drawn = {each.stem for each in tmp_path.iterdir()}
    assert drawn >= {f"feedapi-{name.replace(' ', '-')}" for name in LEAVES}
    assert "MODULE:FUNCTION" in (tmp_path / "feedapi-run.svg").read_text("utf-8")


def test_ingest_without_spark_names_the_extra(
    without: Callable[[ImportError, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("feedapi_client.spark")]:
        monkeypatch.delitem(sys.modules, name)
    without(ModuleNotFoundError("No module named 'pyspark'", name="pyspark"), "pyspark")
    said = "pip install 'feedapi-client[spark]'"
    play([Row("ingest http://h/feed out", 1, said), Row("ingest --help", says="(extra spark)")])
