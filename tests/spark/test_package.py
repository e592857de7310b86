"""The wheel: what it contains, and which dependencies each part of it needs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from feedapi_client.testing import Publisher
from tests.spark import jvm
from tests.spark.conftest import ROOT, needs_jvm


def python(code: str, *paths: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a new interpreter, with `paths` first on its path."""
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=given,
        timeout=500,
        check=False,
        cwd=Path(ROOT).anchor,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, as after an installation."""
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (file,) = folder.glob("*.whl")
    zipfile.ZipFile(file).extractall(folder / "site")
    return folder / "site"


def test_wheel_contains_the_module_that_pyspark_looks_for(wheel: Path) -> None:
    assert (wheel / "pyspark_feedapi" / "__init__.py").exists()
    assert not (wheel / "feedapi_client" / "spark" / "pyspark_feedapi").exists()


BLOCKED = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"


@pytest.mark.parametrize(
    "missing",
    [
        ["pyspark"],
        ["pyarrow"],
        ["obstore"],
        ["zstandard"],
        ["numpy"],
        ["pyspark", "pyarrow", "obstore", "zstandard", "numpy", "httpx"],
    ],
)
def test_module_for_pyspark_never_raises_on_import(wheel: Path, missing: list[str]) -> None:
    done = python(
        BLOCKED.format(names=missing)
        + "import pyspark_feedapi; print(hasattr(pyspark_feedapi, 'DefaultSource'))",
        wheel,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow", "obstore", "zstandard"])
def test_import_without_the_extra_says_what_to_install(missing: str) -> None:
    done = python(BLOCKED.format(names=[missing]) + "import feedapi_client.spark", ROOT)
    assert "pip install 'feedapi-client[spark]'" in done.stderr.splitlines()[-1]


EMPTY_PACKAGE = """
import sys, types
package = types.ModuleType("feedapi_client.spark")
package.__path__ = [{path!r}]
sys.modules["feedapi_client.spark"] = package
"""


def test_fetching_planning_and_staging_need_no_pyspark() -> None:
    code = EMPTY_PACKAGE.format(path=str(ROOT / "feedapi_client" / "spark"))
    code += BLOCKED.format(names=["pyspark", "pyarrow"])
    modules = "options, auth, http_clients, connection, fetch"
    done = python(
        f"{code}from feedapi_client.spark import {modules}\n"
        "from feedapi_client.spark.plan import epoch, planner\n"
        "from feedapi_client.spark.staging import format, location\n",
        ROOT,
    )
    assert done.returncode == 0, done.stderr


FIND = """
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.memory", "600m")
builder = builder.config("spark.driver.extraJavaOptions", {java!r})
spark = builder.getOrCreate()
import feedapi_client
print("from", feedapi_client.__file__)
print("rows", spark.read.format("feedapi").load({url!r}).count())
spark.stop()
"""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_jvm
def test_installed_wheel_needs_no_registration(wheel: Path) -> None:
    publisher = Publisher(partitions=2)
    for n in range(30):
        publisher.publish(f"e{n}", {"n": n})
    with publisher.serve() as url:
        done = python(
            FIND.format(url=url, java=jvm.options()),
            wheel,
            PYSPARK_PYTHON=sys.executable,
            SPARK_LOCAL_IP="127.0.0.1",
        )
    assert f"from {wheel}" in done.stdout, done.stderr[-3000:]
    assert "rows 30" in done.stdout, done.stderr[-3000:]
