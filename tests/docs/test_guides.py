"""The programs of the guides that need a web framework around them."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from feedapi_client import FeedKey
from feedapi_client.testing import Publisher, Response
from tests import warm
from tests.docs.snippets import ROOT, python_blocks
from tests.http.certificates import self_signed, serve_https

FEED = "https://service/myfeed"
TIMEOUT = 100

DRIVE_FASTAPI = """
import time

from app import app
from fastapi.testclient import TestClient

with TestClient(app) as client:
    while client.get("/orders/a").json() != 2:
        time.sleep(0.01)
    print(client.get("/healthz").status_code, client.get("/readyz").json())
"""

FAIL_FASTAPI = """
import logging
import time

from app import app
from fastapi.testclient import TestClient

logging.basicConfig(format="%(levelname)s %(message)s")
with TestClient(app) as client:
    print("answer", client.get("/orders/a").status_code)
    while client.get("/readyz").status_code != 503:
        time.sleep(0.01)
    print("not ready:", client.get("/readyz").json())
    print("healthy:", client.get("/healthz").status_code)
    while client.get("/orders/a").json() != 2:  # the publisher accepts it again
        time.sleep(0.01)
    print("ready:", client.get("/readyz").status_code)
"""

FAIL_TWICE = """

failures = []


def fail_twice():
    if len(failures) < 2:
        failures.append(1)
        print("failure", len(failures), "of the handler", flush=True)
        raise OSError
"""

SETTINGS = """
SECRET_KEY = "of a test"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "django.db"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""


@pytest.fixture
def publisher(feedapi_publisher: Publisher) -> Publisher:
    feedapi_publisher.extend(0, [{"entity": "a", "n": n} for n in range(3)])
    return feedapi_publisher


def block(page: str, publisher: Publisher) -> str:
    assert publisher.url is not None
    (text,) = python_blocks(page)
    assert FEED in text
    return text.replace(FEED, publisher.url)


def started(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, *args],
        check=False,
        cwd=folder,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def run(folder: Path, *args: str) -> str:
    done = started(folder, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_consumer_of_a_fastapi_application(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(block("docs/pages/guides/fastapi.md", publisher))
    (tmp_path / "drive.py").write_text(DRIVE_FASTAPI)
    assert run(tmp_path, "drive.py") == "200 []\n"
    assert (tmp_path / "cursors.db").exists()


@pytest.mark.slow
def test_the_fastapi_application_consumes_again_after_an_error_and_says_so_meanwhile(
    publisher: Publisher, tmp_path: Path
) -> None:
    app = block("docs/pages/guides/fastapi.md", publisher)
    impatient = app.replace("share=Share()", "share=Share(), retry=RetryPolicy(refused_for=0)")
    imported = impatient.replace("FencedError, Share", "FencedError, RetryPolicy, Share")
    (tmp_path / "app.py").write_text(imported)
    (tmp_path / "drive.py").write_text(FAIL_FASTAPI)
    publisher.fail(401, times=2)
    done = started(tmp_path, "drive.py")
    assert done.returncode == 0, done.stderr
    assert "healthy: 200" in done.stdout
    assert "ready: 200" in done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    assert errors
    assert all("401" in line for line in errors)


class DjangoProject:
    """The guide's files in a folder, and a database."""

    def __init__(self, folder: Path, feed: str) -> None:
        self.folder = folder
        installed, models, command = python_blocks("docs/pages/guides/django.md")
        commands = folder / "orders" / "management" / "commands"
        commands.mkdir(parents=True)
        for package in (commands, commands.parent, commands.parent.parent):
            (package / "__init__.py").touch()
        assert FEED in command
        (commands / "consume.py").write_text(command.replace(FEED, feed))
        (folder / "orders" / "models.py").write_text(models)
        (folder / "settings.py").write_text(SETTINGS + installed)
        run(folder, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0")

    def consume(self) -> subprocess.CompletedProcess[str]:
        return started(self.folder, "-m", "django", "consume", "--once")

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.folder / "django.db", timeout=60)) as database, database:
            return database.execute(statement).fetchall()

    def orders(self) -> list[tuple[object, ...]]:
        return self.execute("SELECT n FROM orders_order ORDER BY id")


@pytest.mark.slow
def test_r05_the_consumer_of_a_django_project_counts_each_event_once(
    publisher: Publisher, tmp_path: Path
) -> None:
    project = DjangoProject(tmp_path, str(publisher.url))
    assert project.consume().returncode == 0
    publisher.extend(0, [{"entity": "a", "n": n} for n in range(3, 6)])
    publisher.split(0, into=2)
    assert project.consume().returncode == 0
    assert project.orders() == [(n,) for n in range(6)]


@pytest.mark.slow
def test_r05_what_fails_behind_the_orders_of_django_takes_them_back(
    publisher: Publisher, tmp_path: Path
) -> None:
    project = DjangoProject(tmp_path, str(publisher.url))
    command = tmp_path / "orders" / "management" / "commands" / "consume.py"
    command.write_text(f"{command.read_text()}        fail_twice()\n{FAIL_TWICE}")
    done = project.consume()
    assert done.returncode == 0, done.stderr
    assert re.findall(r"failure (\d) of the handler", done.stdout) == ["1", "2"]
    assert "failed with OSError" in done.stderr
    assert project.orders() == [(n,) for n in range(3)]


@pytest.mark.slow
def test_r17_of_two_django_consumers_the_one_that_is_overtaken_ends(
    publisher: Publisher, tmp_path: Path
) -> None:
    project = DjangoProject(tmp_path, str(publisher.url))
    project.execute(
        "CREATE TRIGGER other AFTER INSERT ON orders_order BEGIN UPDATE feedapi_cursors "
        "SET revision = revision + 1; INSERT OR IGNORE INTO feedapi_cursors "
        "(feed_id, partition_id, feed_cursor, status, revision, saved_at, feed_url, consumer, "
        "filters) VALUES ((SELECT feed FROM of), 0, 'x', 'open', 5, 0, '', '', '{}'); END"
    )
    project.execute("CREATE TABLE of (feed)")
    assert publisher.url is not None
    project.execute(f"INSERT INTO of VALUES ('{FeedKey(publisher.url).id}')")
    done = project.consume()
    assert done.returncode == 1
    assert "FencedError" in done.stderr
    assert project.orders() == []


@pytest.mark.slow
def test_credentials_are_sent(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, oauth, certificate = python_blocks("docs/pages/guides/credentials.md")
    (tmp_path / "token").write_text("made-up-token")
    tokens = Publisher(1)
    granted = b'{"access_token": "made-up-token", "token_type": "bearer"}'
    tokens.fail(
        lambda *_: Response(200, {"content-type": "application/json"}, granted),
        on="any",
        times=None,
    )
    own, server = self_signed(tmp_path, "client.internal"), self_signed(tmp_path, "127.0.0.1")
    shutil.copy(server.path, tmp_path / "company.pem")
    shutil.copy(own.path, tmp_path / "client.pem")
    shutil.copy(own.key, tmp_path / "client.key")
    monkeypatch.setenv("CLIENT_SECRET", "s3cret")

    def events(program: str, feed: str) -> int:
        (tmp_path / "program.py").write_text(program.replace(FEED, feed))
        (tmp_path / "cursors.db").unlink(missing_ok=True)
        return run(tmp_path, "program.py").count("'entity': 'a'")

    with serve_https(publisher, server, clients=own) as url:
        assert events(certificate, url) == 3
    publisher.bearer = "made-up-token"
    assert events(file, str(publisher.url)) == 3
    with tokens.serve() as token_url:
        program = oauth.replace("https://login.example/oauth2/token", token_url)
        assert events(program, str(publisher.url)) == 3


DRIVE_WEBSOCKET = """
from app import app, listeners
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

import app as module

with TestClient(app) as client:
    with client.websocket_connect("/events") as one, client.websocket_connect("/events") as two:
        while len(listeners) < 2 or client.get("/readyz").status_code != 200:
            pass
        print("connected", flush=True)
        print(one.receive_json() == two.receive_json())
    while listeners:
        client.get("/readyz")
    print("gone")
    module.QUEUE = 1
    with client.websocket_connect("/events") as slow:
        while not listeners:
            pass
        client.portal.call(module.drop, next(iter(listeners)))
        try:
            slow.receive_text()
        except WebSocketDisconnect as error:
            print(error.code)
print("ended")
"""


@pytest.mark.slow
def test_events_go_to_websockets_and_all_of_it_ends(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(block("docs/pages/guides/websocket.md", publisher))
    (tmp_path / "drive.py").write_text(DRIVE_WEBSOCKET)
    with warm.Popen(
        [sys.executable, "drive.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        publisher.append(0, {"entity": "a", "n": 3})
        printed, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors
    assert printed == "True\ngone\n1013\nended\n"
