"""Debian's Chromium without a window, driven through a pipe by its DevTools protocol.

The protocol is JSON that ends with a zero byte, so that no other package is needed.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests import components

SAFETY_LIMIT = 60.0
"""Seconds after which waiting fails. No test depends on it."""
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)


class Browser:
    """One browser with one page. All calls block."""

    def __init__(self, program: str, profile: Path) -> None:
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        script = f'exec "$@" 3<&{commands} 4>&{answers}'
        command = [program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(profile)},
        )
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        """The URLs that the page asked for."""
        self.complaints: list[str] = []
        """Errors and warnings in the console, violations of the content security policy too."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(SAFETY_LIMIT)
        os.close(self._read)
        os.close(self._write)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and the preferred colour scheme."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to a page."""
        self._call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        result = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"])
        return result["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true in the page.

        What the expression needs may not be there at first.
        """
        deadline = time.monotonic() + SAFETY_LIMIT
        guarded = f"(() => {{ try {{ return !!({script}) }} catch {{ return false }} }})()"
        while not self.evaluate(guarded):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.02)

    def screenshot(self, path: Path) -> None:
        """Save what the window shows as a PNG."""
        shot = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)
        raise AssertionError("the browser ended")

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Log.entryAdded":
                self.complaints.append(parameters["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(parameters["args"]))

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" in self._buffer:
                message, _, self._buffer = self._buffer.partition(b"\0")
                yield json.loads(message)
            chunk = os.read(self._read, 1 << 16)
            if not chunk:
                return
            self._buffer += chunk


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser, which has to be installed."""
    with Browser(components.require("chromium"), profile) as running:
        yield running
