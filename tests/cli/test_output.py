"""What commands write, and to whom: any encoding, pipes, full disks, terminals, signals."""

from __future__ import annotations

import io
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from select import select
from typing import ClassVar

import anyio
import orjson
import pytest

from feedapi_client import FeedKey, Position, SQLiteCursorStore
from feedapi_client.cli.terminal import say
from feedapi_client.stores import Journal
from feedapi_client.testing import Publisher, faults
from tests.cli.conftest import TIMEOUT, OnTerminal, Spawn

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")
UNBUFFERED = pytest.mark.parametrize("unbuffered", ["", "1"])
BIG = 300
Process = subprocess.Popen[bytes]


@pytest.fixture
def filled(store: Path) -> Path:
    async def save() -> None:
        async with SQLiteCursorStore(store, journal=Journal()) as cursors:
            key = FeedKey("http://h/feed", "näme 漢", {"a": "\x1b"})
            await cursors.save(key, {0: Position("c")})

    anyio.run(save)
    return store


def end(process: Process) -> tuple[int, bytes, bytes]:
    """Return the exit code, and what was written on stdout and stderr."""
    printed, errors = process.communicate(timeout=TIMEOUT)
    return process.returncode, printed or b"", errors or b""


def cursors(store: Path) -> list[str]:
    with closing(sqlite3.connect(store)) as connection:
        return [each for (each,) in connection.execute("SELECT feed_cursor FROM feedapi_cursors")]


def fill(publisher: Publisher, *, big: bool = False) -> None:
    """Publish ten events, or one batch of more than a pipe holds."""
    if big:
        publisher.page_size = publisher.checkpoint_every = BIG
    texts = ["x" * 1000] * BIG if big else [""] * 10
    publisher.extend(0, [{"n": n, "text": text} for n, text in enumerate(texts)])


# ---------------------------------------------------------------------- any encoding


@pytest.mark.slow
@pytest.mark.timeout(600)  # eight processes
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_r21_output_in_any_encoding(
    spawn: Spawn, feedapi_publisher: Publisher, filled: Path, encoding: str
) -> None:
    feedapi_publisher.append(0, {"name": "näme 漢"})
    feedapi_publisher.split(0, into=(1,), method="starts-after")
    body = feedapi_publisher.discovery() | {"filters": ["näme 漢\x1b"]}
    feedapi_publisher.fail(faults.Replace(body), on="discovery", times=None)
    url, place = feedapi_publisher.url, ("--store", filled)
    for words in (
        ["discover", url],
        ["discover", url, "--json"],
        ["cursors", "ls", *place],
        ["cursors", "ls", *place, "--json"],
        ["cursors", "export", *place],
        ["cursors", "set", 0, "c", *place],
        ["cursors", "rewind", "--to", "näme 漢", *place],
        ["--help"],
    ):
        code, printed, errors = end(spawn(*words, env={"PYTHONIOENCODING": encoding}))
        assert code in (0, 2), errors
        assert b"\x1b" not in printed + errors
        (printed + errors).decode(encoding)
        if "--json" in words:
            assert "näme 漢" in orjson.dumps(orjson.loads(printed.decode(encoding))).decode()


def test_what_is_read_need_not_be_text(spawn: Spawn, store: Path) -> None:
    code, printed, errors = end(spawn("discover", os.fsdecode(b"http://h/\xff")))
    assert (code, printed, errors.count(b"\n")) == (2, b"", 1)
    process = spawn("cursors", "import", "-", "--store", store, stdin=subprocess.PIPE)
    printed, errors = process.communicate(b"\xff\x00\x1b[2J", TIMEOUT)
    assert (process.returncode, printed, errors.count(b"\n")) == (2, b"", 1)


def test_a_line_of_ours_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a log record of another thread comes between its text and its end."""

    class Stderr(io.StringIO):
        written: ClassVar[list[str]] = []

        def write(self, text: str) -> int:
            self.written.append(text)
            return len(text)

    monkeypatch.setattr("sys.stderr", Stderr())
    say("monitor at http://127.0.0.1:9464/")
    assert Stderr.written == ["feedapi: monitor at http://127.0.0.1:9464/\n"]


@pytest.mark.parametrize("command", ["discover", "cat"])
def test_a_failed_attempt_is_said_once(spawn: Spawn, command: str) -> None:
    code, _, errors = end(spawn(command, "http://127.0.0.1:9/feed", "--give-up-after", 3))
    attempt, result = errors.decode().splitlines()
    assert (code, "; attempt 2 in " in attempt, result[:9]) == (1, True, "feedapi: ")


# ---------------------------------------------------------------------- readers that are gone


@UNBUFFERED
def test_a_closed_pipe_is_a_regular_end(
    spawn: Spawn, filled: Path, feedapi_publisher: Publisher, unbuffered: str
) -> None:
    url, place = feedapi_publisher.url, ("--store", filled)
    for words in (
        ["cursors", "ls", *place],
        ["cursors", "ls", "--json", *place],
        ["cursors", "set", "0", "c", *place],
        ["discover", url],
        ["doctor", url],
    ):
        reading, writing = os.pipe()
        os.close(reading)
        process = spawn(*words, stdout=writing, env={"PYTHONUNBUFFERED": unbuffered})
        os.close(writing)
        assert end(process) == (0, b"", b"")


def close(process: Process) -> None:
    """Close our end of stdout."""
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None


@pytest.mark.slow
@UNBUFFERED
def test_r5_what_a_reader_does_not_take_is_not_committed(
    spawn: Spawn, feedapi_publisher: Publisher, store: Path, unbuffered: str
) -> None:
    fill(feedapi_publisher, big=True)
    env = {"PYTHONUNBUFFERED": unbuffered}
    process = spawn("cat", feedapi_publisher.url, "--store", store, env=env)
    assert process.stdout is not None
    process.stdout.read(1)
    close(process)
    assert end(process) == (0, b"", b"")
    assert cursors(store) == ["_first"]
    slow = spawn("cat", feedapi_publisher.url, env=env)
    assert slow.stdout is not None
    assert len(slow.stdout.readlines()) == BIG


def test_r16_a_pipe_that_does_not_block_is_waited_for(
    spawn: Spawn, feedapi_publisher: Publisher
) -> None:
    fill(feedapi_publisher, big=True)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # as Node.js leaves what it shares
    with open(reading, "rb") as pipe:
        process = spawn("cat", feedapi_publisher.url, stdout=writing)
        os.close(writing)
        with suppress(subprocess.TimeoutExpired):
            process.wait(3)  # a reader that takes its time
        assert len(pipe.readlines()) == BIG
    assert end(process) == (0, b"", b"")


@pytest.mark.slow
def test_a_pipe_closed_while_the_feed_is_idle_ends_it(
    spawn: Spawn, feedapi_publisher: Publisher
) -> None:
    feedapi_publisher.append(0, {"n": 0})
    process = spawn("cat", feedapi_publisher.url, "--follow")
    assert process.stdout is not None
    process.stdout.readline()
    close(process)
    assert end(process) == (0, b"", b"")


@pytest.mark.parametrize(
    "words",
    [
        "cursors export --store STORE",
        "cursors ls --store STORE",
        "cat URL --store STORE",
        "discover URL",
        "doctor URL",
    ],
)
def test_a_full_disk_is_one_line(
    spawn: Spawn, feedapi_publisher: Publisher, filled: Path, words: str
) -> None:
    fill(feedapi_publisher)
    places = {"URL": feedapi_publisher.url, "STORE": filled}
    with Path("/dev/full").open("wb") as full:
        process = spawn(*(places.get(word, word) for word in words.split()), stdout=full)
        assert end(process) == (1, b"", b"feedapi: No space left on device\n")
    assert feedapi_publisher.end_cursor(0) not in cursors(filled)


@pytest.mark.parametrize(
    "words",
    [
        ["set", "0", "c"],
        ["skip", "URL"],
        ["rename", "näme 漢", "other"],
        ["reset", "--yes"],
        ["reset", "--yes", "--json"],
        ["rewind", "--to", "now", "--yes"],
    ],
)
def test_a_full_disk_fails_nothing_that_is_done(
    spawn: Spawn, filled: Path, feedapi_publisher: Publisher, words: list[str]
) -> None:
    given = [feedapi_publisher.url if word == "URL" else word for word in words]
    with Path("/dev/full").open("wb") as full:
        code, _, errors = end(spawn("cursors", *given, "--store", filled, stdout=full))
    begin = b"feedapi: stdout can't be written (No space left on device), but this is done: "
    assert (code, errors.startswith(begin), errors.count(b"\n")) == (0, True, 1), errors


@UNBUFFERED
def test_a_full_disk_for_errors_changes_no_exit_code(
    spawn: Spawn, filled: Path, unbuffered: str
) -> None:
    words = ("cursors", "set", "--store", filled)
    with Path("/dev/full").open("wb") as full:
        env = {"PYTHONUNBUFFERED": unbuffered}
        process = spawn(*words, "0", "c", stdout=full, stderr=full, env=env)
        assert process.wait(TIMEOUT) == 0
        assert end(spawn(*words, stderr=full, env=env))[0] == 2


@pytest.mark.parametrize(
    ("words", "closed", "code", "said"),
    [
        ("cursors reset --store STORE", "0", 1, b"feedapi: aborted\n"),
        ("cursors reset --store STORE", "1", 1, b"feedapi: stdout is closed\n"),
        ("cursors reset --store STORE", "2", 1, b""),
        ("cat URL", "1", 1, b"feedapi: stdout is closed\n"),
        ("cat URL", "2", 0, b""),
    ],
)
def test_a_stream_that_the_caller_closed(
    filled: Path, feedapi_publisher: Publisher, words: str, closed: str, code: int, said: bytes
) -> None:
    fill(feedapi_publisher)
    places = {"STORE": str(filled), "URL": str(feedapi_publisher.url)}
    command = [sys.executable, "-m", "feedapi_client.cli", *words.split()]
    run = ["bash", "-c", f'exec "$@" {closed}>&-', "bash", *(places.get(w, w) for w in command)]
    done = subprocess.run(run, check=False, capture_output=True, timeout=TIMEOUT)
    assert (done.returncode, done.stderr) == (code, said)
    assert done.stdout.count(b"\n") == (0 if code else 10)


# ---------------------------------------------------------------------- terminals


def test_r21_events_on_a_terminal_are_escaped(
    on_terminal: OnTerminal, feedapi_publisher: Publisher
) -> None:
    text = "\x7f\x9b2J\u202e漢"
    feedapi_publisher.append(0, {"a": text})
    for options in ([], ["--raw"]):
        code, shown = on_terminal("stdout", "cat", feedapi_publisher.url, *options)
        assert code == 0
        assert all(line.isprintable() for line in shown.replace("\r\n", "\n").split("\n"))
        assert text in orjson.dumps(orjson.loads(shown)).decode()


def test_a_table_is_drawn_on_a_terminal(on_terminal: OnTerminal, filled: Path) -> None:
    code, shown = on_terminal("stdout", "cursors", "ls", "--store", filled)
    assert (code, "┃" in shown, "\t" in shown) == (0, True, False)


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_unless_it_is_to_be_quiet(
    on_terminal: OnTerminal, feedapi_publisher: Publisher
) -> None:
    fill(feedapi_publisher)
    code, shown = on_terminal("stderr", "cat", feedapi_publisher.url)
    assert code == 0
    assert re.search(r"10 events · [\d,]+/s · 1 \w+", shown)
    assert on_terminal("stderr", "cat", feedapi_publisher.url, "--quiet") == (0, "")


def test_ctrl_c_at_a_question_is_an_interruption(filled: Path, spawn: Spawn) -> None:
    import pty

    ours, theirs = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    # A shell starts what runs in the background, as these tests may, with SIGINT ignored.
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = spawn("cursors", "reset", "--store", filled, **streams, preexec_fn=default)
    os.close(theirs)
    shown = b""
    while b"?" not in shown:
        shown += os.read(ours, 1024)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # raised when the process closed its end of the terminal
        while True:
            # CPython sees a signal that comes just before input() reads only after the read.
            if not select([ours], [], [], 5.0)[0]:
                process.send_signal(signal.SIGINT)
            elif chunk := os.read(ours, 1024):
                shown += chunk
            else:
                break
    os.close(ours)
    assert (process.wait(TIMEOUT), b"Traceback" in shown) == (130, False)


# ---------------------------------------------------------------------- signals of `cat`


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_after_the_batch_in_flight(
    spawn: Spawn, feedapi_publisher: Publisher, store: Path, number: signal.Signals, code: int
) -> None:
    process = spawn("cat", feedapi_publisher.url, "--follow", "--raw", "--store", store)
    assert process.stdout is not None
    for n in range(3):
        feedapi_publisher.append(0, {"n": n})
        assert process.stdout.readline() == b'{"n":%d}\n' % n
    process.send_signal(number)
    assert end(process) == (code, b"", b"")
    assert cursors(store) == [feedapi_publisher.end_cursor(0)]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["cat", "discover"])
def test_a_signal_ends_it_while_the_feed_does_not_answer(
    spawn: Spawn, feedapi_publisher: Publisher, command: str
) -> None:
    hung = feedapi_publisher.fail(faults.Hang(), on="discovery", times=None)
    process = spawn(command, feedapi_publisher.url)
    while not hung.hits:
        assert process.poll() is None
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, b"", b"")


@pytest.mark.slow
def test_a_second_signal_ends_it_while_stdout_is_blocked(
    spawn: Spawn, feedapi_publisher: Publisher, store: Path
) -> None:
    fill(feedapi_publisher, big=True)
    process = spawn("cat", feedapi_publisher.url, "--store", store)
    assert process.stdout is not None
    process.stdout.read(1)  # it is writing now, and blocked once the pipe is full
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
    assert (process.returncode, cursors(store)) == (130, ["_first"])


@pytest.mark.slow
def test_https_to_a_plain_port_is_named_at_once(spawn: Spawn, feedapi_publisher: Publisher) -> None:
    url = str(feedapi_publisher.url).replace("http://", "https://")
    code, _, errors = end(spawn("cat", url))
    assert (code, b"does not speak TLS" in errors, errors.count(b"\n")) == (1, True, 1)
