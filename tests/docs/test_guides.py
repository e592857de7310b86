"""The programs of the guides that need a web framework around them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from feedapi_client.testing import Publisher
from tests.docs.snippets import ROOT, python_blocks

FEED = "https://service/myfeed"
TIMEOUT = 100

DRIVE_FASTAPI = """
import time

from app import app
from fastapi.testclient import TestClient

with TestClient(app) as client:
    while client.get("/orders/a").json() != 2:
        time.sleep(0.01)
    print(client.get("/consumer").json())
"""

SETTINGS = """
SECRET_KEY = "of a test"
INSTALLED_APPS = ["orders"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "django.db"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

MODELS = """
from django.db import models


class Order(models.Model):
    entity = models.TextField(unique=True)
    n = models.IntegerField()
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


def run(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, *args],
        check=False,
        cwd=folder,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_consumer_of_a_fastapi_application(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(block("docs/pages/guides/fastapi.md", publisher))
    (tmp_path / "drive.py").write_text(DRIVE_FASTAPI)
    assert "'0': " in run(tmp_path, "drive.py")
    assert (tmp_path / "cursors.db").exists()


@pytest.mark.slow
def test_the_consumer_of_a_django_project(publisher: Publisher, tmp_path: Path) -> None:
    commands = tmp_path / "orders" / "management" / "commands"
    commands.mkdir(parents=True)
    for folder in (commands, commands.parent, commands.parent.parent):
        (folder / "__init__.py").touch()
    (commands / "consume.py").write_text(block("docs/pages/guides/django.md", publisher))
    (tmp_path / "orders" / "models.py").write_text(MODELS)
    (tmp_path / "settings.py").write_text(SETTINGS)
    run(tmp_path, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0")
    run(tmp_path, "-m", "django", "consume", "--once")
    look = "from orders.models import Order; print(list(Order.objects.values('entity', 'n')))"
    shown = run(tmp_path, "-m", "django", "shell", "--verbosity", "0", "-c", look)
    assert shown == "[{'entity': 'a', 'n': 2}]\n"
