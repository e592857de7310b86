"""Builds the real Liftbridge from its Go module, once, into the user's cache.

``python -m tests.liftbridge.build`` prints the folder, which FEEDAPI_LIFTBRIDGE can name.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console

from feedapi_client.testing.liftbridge import (
    LIFTBRIDGE_FOLDER,
    LIFTBRIDGE_VERSION,
)
from tests import components

MODULE = "github.com/liftbridge-io/liftbridge"
SECONDS = 600
"""A safety net for downloads."""


def folder() -> Path:
    """Where the program is, or will be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "feedapi-client" / f"liftbridge-{LIFTBRIDGE_VERSION}"


def build(go: str, console: Console | None = None) -> Path:
    """Return the program, which is built by the first of several processes that ask for it.

    Raises:
        components.MissingError: its module can't be had, or does not build here.
    """
    target = folder() / "liftbridge"
    with components.locked(target.parent / "lock"):
        if not target.exists():
            _build(go, target, console or Console(stderr=True))
    os.environ[LIFTBRIDGE_FOLDER] = str(target.parent)
    return target


def _build(go: str, target: Path, console: Console) -> None:
    # No C compiler is needed, and none of the toolchains that go.mod may ask for.
    environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
    place = target.parent
    console.print(f"building Liftbridge {LIFTBRIDGE_VERSION}, once, into {place}")

    def run(what: str, *arguments: str, cwd: str | None = None) -> str:
        try:
            done = subprocess.run(
                [go, *arguments],
                cwd=cwd,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise components.MissingError(f"{what} in {SECONDS} s") from error
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout).strip().splitlines() or ["no reason"]
            raise components.MissingError(f"{what}: {said[-1][:300]}") from error
        return done.stdout

    # Not by "go install", which asks for the list of all versions: not every proxy has it.
    module = f"{MODULE}@{LIFTBRIDGE_VERSION}"
    found = run("the Go module of Liftbridge can't be had", "mod", "download", "-json", module)
    with tempfile.TemporaryDirectory(dir=target.parent) as new:
        program = Path(new, "liftbridge")
        options = ["-mod=readonly", "-trimpath", "-ldflags", "-s -w", "-o", str(program)]
        # In the module's folder, so that its own go.mod and go.sum count.
        source = json.loads(found)["Dir"]
        run(f"Liftbridge {LIFTBRIDGE_VERSION} did not build", "build", *options, ".", cwd=source)
        program.replace(target)


if __name__ == "__main__":
    found = components.available("liftbridge")
    if found is None:
        raise SystemExit("Liftbridge can't be had")
    print(Path(found).parent)
