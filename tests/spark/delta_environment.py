"""A Python environment with real Delta tables.

Delta Lake 4.4.0 is built for Spark 4.0 to 4.2. Its jar for 4.2 fails in Spark 4.3 with
NoSuchMethodError (LogicalRDD). The tests of Delta tables therefore run with PySpark 4.2.0, in an
environment that is made once and kept in the user's cache. All other packages are those of the
environment that runs the tests. The jars come from Maven.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.spark.python_path import ROOT, python_path

PYSPARK = "4.2.0"
DELTA = "4.4.0"
# Other dependencies of the kernel, such as Hadoop and Parquet, are those of Spark.
ARTIFACTS = (
    "delta-spark_4.2_2.13",
    "delta-storage",
    "delta-kernel-api",
    "delta-kernel-defaults",
    "delta-kernel-unitycatalog",
)
CONFIGURATION = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.ui.showConsoleProgress": "false",
}


def location() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache / "feedapi-client" / f"delta-{DELTA}-pyspark-{PYSPARK}-python-{python}"


def environment() -> Path:
    """Return the folder of the environment, which is made when it does not exist."""
    folder = location()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _make(new)
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return folder


def run(arguments: list[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run Python with PySpark 4.2.0 and Delta."""
    folder = environment()
    jars = ",".join(str(jar) for jar in sorted((folder / "jars").glob("*.jar")))
    conf = " ".join(f"--conf {name}={value}" for name, value in CONFIGURATION.items())
    given = {
        **os.environ,
        "PYTHONPATH": python_path(folder / "packages"),
        "PYSPARK_SUBMIT_ARGS": f"--jars {jars} {conf} pyspark-shell",
        "SPARK_HOME": str(folder / "packages" / "pyspark"),
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=given,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _make(folder: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run(
        [*install, "--target", str(folder / "packages"), f"pyspark=={PYSPARK}"], check=True
    )
    for artifact in ARTIFACTS:
        copy = ["mvn", "--batch-mode", "--quiet", "dependency:copy", "-Dtransitive=false"]
        copy += [f"-Dartifact=io.delta:{artifact}:{DELTA}", f"-DoutputDirectory={folder / 'jars'}"]
        subprocess.run(copy, check=True, cwd=folder)
