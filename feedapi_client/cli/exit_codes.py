"""Exit codes of ``feedapi``."""

from __future__ import annotations

FAILURE = 1
"""The feed, the cursor store or the output failed, or the proof of the demo did."""
USAGE = 2
"""The command line is wrong."""
HANDLER_FAILED = 3
"""``feedapi run``: the application's handler raised."""
FENCED = 4
"""``feedapi run``: another consumer of the same name has taken over."""
UNREACHABLE = 69
"""The feed could not be reached, so that nothing can be said about it (``feedapi doctor``)."""
INTERNAL_ERROR = 70
"""A bug in this program."""
SIGNALLED = 128
"""Ended by a signal: this plus the signal's number."""
INTERRUPTED = SIGNALLED + 2
"""Ended by Ctrl-C (SIGINT)."""

TABLE: tuple[tuple[str, str], ...] = (
    (
        "0",
        (
            "done: the end of the feed, or ended by a signal with all in flight committed; also "
            "when the reader of the output closed the pipe"
        ),
    ),
    (
        "1",
        (
            "the feed, the cursor store or the output failed, a check or a proof did, an event "
            "failed again, or a question was answered with no"
        ),
    ),
    (
        "2",
        (
            "the command line is wrong, or what it names can't be used: a URL, a file, a time, a "
            "handler, the number of partitions"
        ),
    ),
    ("3", "run: the handler failed"),
    ("4", "run: another consumer of this name has taken over"),
    ("69", "doctor: the feed can't be reached, or refuses the credentials"),
    ("70", "a bug in this program; FEEDAPI_DEBUG=1 shows where"),
    (
        "130, 143",
        (
            "ended by Ctrl-C or SIGTERM; of run: what was in flight was cancelled after --grace, "
            "and is read again"
        ),
    ),
)
"""All exit codes of all commands, with what they mean: the help and the documentation have it."""

HELP = "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in TABLE) + "."
