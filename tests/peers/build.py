"""Builds the publisher of `go_publisher` with the published Go library, once for each version.

The library's module can't be had from a proxy. Its source is named by FEEDAPI_GO_SOURCE, or lies in
``../shared/peers/feedapi-go`` beside the checkout. Nothing of it is part of this project.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests import components
from tests.liftbridge.build import SECONDS

SOURCE = "FEEDAPI_GO_SOURCE"
_PROGRAM = Path(__file__).parent / "go_publisher" / "main.go"
_CHECKOUT = Path(__file__).parents[2]
_REQUIRED = re.compile(r"^require \(.*?^\)\n", re.DOTALL | re.MULTILINE)
_MODULE = "github.com/vippsas/feedapi-go/feedapi"


def source() -> Path | None:
    """Return the folder of the library's module; None where it is not there."""
    named = os.environ.get(SOURCE)
    root = Path(named) if named else _CHECKOUT.parent / "shared" / "peers" / "feedapi-go"
    module = root / "feedapi"
    return module if (module / "go.mod").exists() else None


def build() -> Path:
    """Return the program, which is built by the first of several processes that ask for it.

    Raises:
        components.MissingError: Go or the library's source is missing, or it does not build here.
    """
    go, module = components.available("go"), source()
    if go is None:
        raise components.MissingError("it needs Go")
    if module is None:
        raise components.MissingError("its source is not there")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "feedapi-client"
    target = cache / f"go-publisher-{_digest(module)}" / "publisher"
    with components.locked(target.parent / "lock"):
        if not target.exists():
            _build(go, module, target)
    return target


def _digest(module: Path) -> str:
    """Return what changes with our program and with the library."""
    digest = hashlib.sha256(_PROGRAM.read_bytes())
    for path in sorted([*module.glob("*.go"), module / "go.mod"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _build(go: str, module: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        shutil.copy(_PROGRAM, folder)
        shutil.copy(module / "go.sum", folder)
        required = _REQUIRED.findall((module / "go.mod").read_text(encoding="utf-8"))
        (folder / "go.mod").write_text(
            "module publisher\n\ngo 1.23\n\n"
            f"require {_MODULE} v0.0.0\n{''.join(required)}"
            f'replace {_MODULE} => "{module}"\n',
            encoding="utf-8",
        )
        environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
        done = subprocess.run(
            [go, "build", "-mod=mod", "-o", "publisher", "."],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS / 2,
            check=False,
        )
        if done.returncode:
            raise components.MissingError(f"it does not build: {done.stderr.strip()[-300:]}")
        (folder / "publisher").replace(target)
