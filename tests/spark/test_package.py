"""The wheel: what it contains, and which dependencies each part of it needs."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pyspark
import pytest

from feedapi_client.spark import ensure_java
from feedapi_client.testing import Publisher
from tests.spark.conftest import ROOT, needs_jvm
from tests.spark.delta_environment import DELTA, JARS, PYSPARK
from tests.spark.sessions import configuration


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


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow", "obstore", "numpy", "all"])
def test_without_the_extra_pyspark_finds_no_format_and_an_import_says_what_to_install(
    wheel: Path, missing: str
) -> None:
    names = ["pyspark", "pyarrow", "obstore", "numpy", "httpx"] if missing == "all" else [missing]
    blocked = BLOCKED.format(names=names)
    code = "import pyspark_feedapi; print(hasattr(pyspark_feedapi, 'DefaultSource'))"
    done = python(blocked + code, wheel)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
    if missing != "all":
        done = python(f"{blocked}import feedapi_client.spark", ROOT)
        assert "pip install 'feedapi-client[spark]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("version", ["3.5.7", "4.0.1", "4.1.0"])
def test_r10_older_pyspark_is_named_with_what_is_needed(tmp_path: Path, version: str) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    installed = tmp_path / f"pyspark-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pyspark\nVersion: {version}")
    done = python("import feedapi_client.spark", tmp_path, ROOT)
    needed = f"needs PySpark 4.2 or newer, and {version} is installed: pip install 'pyspark>=4.2'"
    assert needed in done.stderr.splitlines()[-1]
    code = "import sys; sys.argv[1:] = ['ingest', 'http://host/feed', 'out']; "
    done = python(f"{code}from feedapi_client.cli import main; main()", tmp_path, ROOT)
    assert done.returncode != 0
    assert needed in done.stderr
    assert "Traceback" not in done.stderr


def test_extra_delta_brings_what_belongs_to_the_documented_jar() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"delta-spark=={DELTA}" in extras["optional-dependencies"]["delta"]
    page = (ROOT / "docs" / "pages" / "lakehouse.md").read_text()
    assert f"io.delta:{next(iter(JARS))}:{DELTA}" in page
    assert f"`pip install\n'feedapi-client[delta]'` brings PySpark {PYSPARK}" in page


EMPTY_PACKAGE = """
import sys, types
package = types.ModuleType("feedapi_client.spark")
package.__path__ = [{path!r}]
sys.modules["feedapi_client.spark"] = package
"""


def test_fetching_planning_and_staging_need_no_pyspark() -> None:
    code = EMPTY_PACKAGE.format(path=str(ROOT / "feedapi_client" / "spark"))
    code += BLOCKED.format(names=["pyspark", "pyarrow"])
    modules = "source_options, feed_access, fetch, epoch, feed_watch, staging"
    done = python(f"{code}from feedapi_client.spark import {modules}\n", ROOT)
    assert done.returncode == 0, done.stderr


def test_no_process_of_the_source_loads_the_functions_of_arrow() -> None:
    """It would take each of them a tenth of a second."""
    code = "import sys, pyspark.worker, feedapi_client.spark.batch, feedapi_client.spark.stream\n"
    done = python(f"{code}print('pyarrow.compute' in sys.modules)", ROOT)
    assert done.stdout.split()[-1] == "False", done.stderr


PROGRAM = """
import sys
from pyspark.sql import SparkSession
import feedapi_client
from feedapi_client.spark import ingest

spark = SparkSession.builder.getOrCreate()
print("from", feedapi_client.__file__)
print("rows", spark.read.format("feedapi").load(sys.argv[1]).count())
print(ingest.run(spark, ingest.Ingest(url=sys.argv[1], output=sys.argv[2])))
"""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_jvm
def test_spark_submit_needs_the_wheel_only_and_no_registration(wheel: Path, tmp_path: Path) -> None:
    """Driver and executors get the wheel by ``--py-files``; the packages it needs are there."""
    (file,) = wheel.parent.glob("*.whl")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit")]
    submit += ["--master", "local-cluster[1,1,1024]", "--deploy-mode", "client"]
    for name, value in configuration().items():
        submit += ["--conf", f"{name}={value}"]
    publisher = Publisher(partitions=2)
    for n in range(30):
        publisher.publish(f"e{n}", {"n": n})
    with publisher.serve() as url:
        done = subprocess.run(
            [*submit, "--py-files", str(file), str(program), str(url), str(tmp_path / "table")],
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
            cwd=tmp_path,
            env={
                **os.environ,
                "JAVA_HOME": str(ensure_java().home or os.environ.get("JAVA_HOME", "")),
                "PYTHONPATH": "",
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"/{file.name}/feedapi_client/__init__.py" in done.stdout
    assert "rows 30" in done.stdout
    assert f"30 rows in 1 micro-batch to {tmp_path / 'table'}" in done.stdout
