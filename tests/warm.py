"""Python programs without the time of their imports, which is a second for the command line.

`Popen` and `run` stand for subprocess's, for commands that begin with `sys.executable`. A process
imports what most programs need and does nothing else, and each program is a fork of it. The program
has a process id, streams, environment and directory of its own, is a child of the process of the
tests, can be killed, and ends as an interpreter ends. Only its imports are older than it is.

So tests of a start, of imports or of packaging use subprocess, as do those with a variable of the
interpreter other than PYTHONIOENCODING, PYTHONPATH, PYTHONUNBUFFERED and PYTHONWARNINGS.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = Path(__file__).parents[1]
_SET_CHILD_SUBREAPER = 36
_IMPORTS = (
    "anyio._backends._asyncio",
    "anyio._backends._trio",
    "asyncpg",
    "django.core.management",
    "django.db.models",
    "feedapi_client.cli.app",
    "feedapi_client.cli.run",
    "feedapi_client.consumer",
    "feedapi_client.liftbridge",
    "feedapi_client.monitor",
    "feedapi_client.operations",
    "feedapi_client.quarantine.quarantine_store",
    "feedapi_client.quarantine.quarantine_store",
    "feedapi_client.stores.postgres",
    "feedapi_client.stores.sql",
    "feedapi_client.sync",
    "feedapi_client.testing",
    "psycopg_pool",
    "pymysql",
    "redis.asyncio",
    "sqlalchemy.ext.asyncio",
    "tests.servers",
)


class _Parent:
    """The process that programs are forks of. It starts with the first program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Start a program and return its process id."""
        content = json.dumps(request).encode()
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            if self._process is None:
                self._start()
            # The process in between ends at once, and then this one is the program's parent.
            prctl(_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [b"%10d" % len(content)], streams)
                self._socket.sendall(content)
                return int(self._socket.recv(10, socket.MSG_WAITALL))
            finally:
                prctl(_SET_CHILD_SUBREAPER, 0)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                cwd=_ROOT,
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._socket.close()
        assert self._process is not None
        self._process.wait()


_parent = _Parent()


class _Popen(subprocess.Popen[Any]):
    def _execute_child(self, args: list[Any], *given: Any) -> None:
        """Start the program. What follows, such as waiting for it, is as with any child."""
        cwd, env, pipes, new_session = given[4], given[5], given[9:15], given[20]
        python, *arguments = map(os.fspath, args)
        assert python == sys.executable
        request = {
            "arguments": arguments,
            "directory": os.path.abspath(cwd or "."),
            "environment": dict(os.environ if env is None else env),
            "new session": new_session,
        }
        theirs = (pipes[0], pipes[3], pipes[5])
        streams = [ours if fd == -1 else fd for ours, fd in enumerate(theirs)]
        self.pid = _parent.fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


# Elsewhere no process can adopt another one.
Popen = _Popen if sys.platform == "linux" else subprocess.Popen


def run(
    command: list[Any], *, timeout: float | None = None, check: bool = False, **settings: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end, as `subprocess.run` does."""
    if settings.pop("capture_output", False):
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **settings) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


# The process that programs are forks of


def _serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request. Return in the forks only."""
    while True:
        size, streams, _, _ = socket.recv_fds(requests, 10, 3)
        if not size:
            sys.exit()
        request = json.loads(requests.recv(int(size), socket.MSG_WAITALL))
        ours, theirs = os.pipe()
        between = os.fork()
        if not between:
            parent = os.getpid()
            if program := os.fork():
                os.write(theirs, b"%10d" % program)
                os._exit(0)
            for fd in (ours, theirs, requests.detach()):
                os.close(fd)
            while os.getppid() == parent:
                time.sleep(0.001)
            return request, streams
        os.waitpid(between, 0)
        requests.sendall(os.read(ours, 10))
        for fd in (ours, theirs, *streams):
            os.close(fd)


def _become(request: dict[str, Any], streams: list[int]) -> tuple[Any, dict[str, Any]]:
    """Make of this process what the interpreter is before it runs the program."""
    if request["new session"]:
        os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    for fd in streams:
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = [_stream(number) for number in range(3)]
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    options = [option for option in os.environ.get("PYTHONWARNINGS", "").split(",") if option]
    arguments = request["arguments"]
    while arguments[0] == "-W":
        options.append(arguments[1])
        arguments = arguments[2:]
    for option in options:
        action, _, category = option.partition("::")
        kind = getattr(__builtins__, category or "Warning")
        warnings.simplefilter(action, kind)  # type: ignore[arg-type]
    sys.warnoptions[:] = options
    sys.path[0:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return _program(arguments)


def _stream(number: int) -> io.TextIOWrapper:
    """Return stdin, stdout or stderr as the environment says."""
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    errors = errors or ("strict" if encoding else sys.stdin.errors or "")
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    mode, size = "wb" if number else "rb", 0 if unbuffered and number else -1
    return io.TextIOWrapper(
        open(number, mode, size, closefd=False),  # type: ignore[arg-type]
        encoding or sys.stdin.encoding,
        "backslashreplace"
        if number == 2
        else errors or ("strict" if encoding else sys.stdin.errors),
        line_buffering=not unbuffered and (number == 2 or os.isatty(number)),
        write_through=unbuffered,
    )


def _program(arguments: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return the code of the program and the names of its module."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        return compile(arguments[1], "<string>", "exec", dont_inherit=True), main.__dict__
    if arguments[0] != "-m":
        path = os.path.abspath(arguments[0])
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(path))
        main.__file__ = path
        return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__
    sys.path.insert(0, os.getcwd())
    name = arguments[1]
    spec = importlib.util.find_spec(name)
    if spec and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{name}.__main__")
    assert spec
    assert spec.origin
    sys.argv = [spec.origin, *arguments[2:]]
    main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
    main.__loader__ = spec.loader
    return spec.loader.get_code(spec.name), main.__dict__  # type: ignore[union-attr]


if __name__ == "__main__":
    for name in _IMPORTS:
        importlib.import_module(name)
    sys.path.pop(0)  # the directory
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has no threads"
    code, names = _become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
    # As an interpreter runs it: what it raises ends the process.
    exec(code, names)
