"""A Python environment with real Delta tables.

Delta Lake 4.4.0 is built for Spark 4.0 to 4.2. Its jar for 4.2 fails in Spark 4.3 with
NoSuchMethodError (LogicalRDD). The tests of Delta tables therefore run with PySpark 4.2.0, in an
environment that is made once and kept in the user's cache. All other packages are those of the
environment that runs the tests. Spark's own resolver fetches the jars.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.utils import CryptographyDeprecationWarning

from tests import components
from tests.spark.python_path import ROOT, python_path

PYSPARK = "4.2.0"
DELTA = "4.4.0"
# With their SHA-256. Other dependencies of the kernel, such as Hadoop and Parquet, are Spark's.
JARS = {
    "delta-spark_4.2_2.13": "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead",
    "delta-storage": "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc",
    "delta-kernel-api": "ee9b5a14ac3b7efdff4d61a58478fe8eb0e5a3fbca43889dca7290795fe79a11",
    "delta-kernel-defaults": "225c975199e4718b38ee5b7e6da7f19e9585024262b2cec2656b32151a856b0b",
    "delta-kernel-unitycatalog": "cea22dfb4ac562b3cd27bf652697750e8336009d73fb06631363aaaad5345ffa",
}
CONFIGURATION = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "1",
    # VACUUM looks for files in as many tasks: 10,000, which take a minute.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
    "spark.ui.showConsoleProgress": "false",
    # As with checkpoints in `sessions`: for one JVM.
    "spark.delta.logStore.file.impl": "io.delta.storage.LocalLogStore",
}


def location() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache / "feedapi-client" / f"delta-{DELTA}-pyspark-{PYSPARK}-python-{python}"


def environment() -> Path:
    """Return the folder of the environment, which is made when it does not exist.

    Raises:
        components.MissingError: its packages can't be had.
    """
    folder = location()
    with components.locked(folder.parent / f"{folder.name}.lock"):
        if not folder.exists():
            _make_beside(folder)
    return folder


def _make_beside(folder: Path) -> None:
    """Make it whole, then give it its name."""
    new = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _make(new)
        new.rename(folder)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines() or ["no reason"]
        raise components.MissingError(f"{error.cmd[0]} failed: {said[-1][:300]}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


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
    packages = folder / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    _run([*install, "--target", str(packages), f"pyspark=={PYSPARK}"])
    _download_jars(packages / "pyspark", folder)
    (folder / "jars").mkdir()
    for artifact, digest in JARS.items():
        jar = folder / "ivy" / "jars" / f"io.delta_{artifact}-{DELTA}.jar"
        found = hashlib.sha256(jar.read_bytes()).hexdigest()
        if found != digest:
            raise RuntimeError(f"{jar.name} has the digest {found}, not {digest}")
        jar.rename(folder / "jars" / jar.name)
    shutil.rmtree(folder / "ivy")


def _download_jars(spark: Path, folder: Path) -> None:
    """Let Spark's own resolver fetch Delta's jars, with the certificates that Python trusts."""
    program = folder / "nothing.py"
    program.touch()
    command = [str(spark / "bin" / "spark-submit"), "--packages"]
    command += [f"io.delta:{next(iter(JARS))}:{DELTA}"]
    command += ["--conf", f"spark.jars.ivy={folder / 'ivy'}", str(program)]
    _run(
        command,
        SPARK_HOME=str(spark),
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_PYTHON=sys.executable,
        SPARK_SUBMIT_OPTS=_trust(folder / "trusted.p12"),
    )


def _run(command: list[str], **environment: str) -> None:
    given = {**os.environ, **environment}
    subprocess.run(command, check=True, capture_output=True, text=True, env=given)


def _trust(file: Path) -> str:
    """Write Python's authorities for a JVM, whose own may lack a company's. Return its options."""
    entries = [
        pkcs12.PKCS12Certificate(each, str(number).encode())
        for number, each in enumerate(_authorities())
    ]
    if not entries:
        return ""
    protection = serialization.BestAvailableEncryption(b"changeit")
    file.write_bytes(pkcs12.serialize_java_truststore(entries, protection))
    name = "-Djavax.net.ssl.trustStore"
    return f"{name}={file} {name}Password=changeit {name}Type=PKCS12"


def _authorities() -> Iterator[x509.Certificate]:
    """Yield the authorities that Python trusts, but for those that RFC 5280 disallows.

    A machine's bundle may hold some with a negative serial number, which cryptography warns of.
    """
    for certificate in ssl.create_default_context().get_ca_certs(binary_form=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CryptographyDeprecationWarning)
            try:
                authority = x509.load_der_x509_certificate(certificate)
            except ValueError:
                continue
        yield authority
