"""`feedapi ingest` of a feed whose certificate only an own authority signed."""

from __future__ import annotations

from pathlib import Path

import pytest

from feedapi_client.spark.ingest.ingest_command import _job, main, parser
from tests.http.certificates import Certificate, self_signed

URL = "https://service/feed"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.mark.parametrize("by_variable", [True, False])
def test_ingest_refuses_a_file_without_certificates(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    by_variable: bool,
) -> None:
    (tmp_path / "empty.pem").write_text("no certificate")
    for name in ("empty.pem", "absent.pem"):
        file = str(tmp_path / name)
        if by_variable:
            monkeypatch.setenv("FEEDAPI_CA_FILE", file)
        assert main([URL, "out", *(() if by_variable else ("--ca-file", file))]) == 2
        assert f"--ca-file: {file} holds no certificates" in capsys.readouterr().err


def test_ingest_gives_the_source_the_place_of_the_file(certificate: Certificate) -> None:
    given = vars(parser().parse_args([URL, "out", "--ca-file", str(certificate.path)]))
    for name in ("json", "conf"):
        del given[name]
    assert _job(given).options == {"caFile": str(certificate.path)}
