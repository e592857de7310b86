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

HELP = (
    "Exit codes: 0 success; 1 the feed, the cursor store or the output failed, or a proof did; "
    "2 the command line is wrong; 69 the doctor could not reach the feed; 130 ended by Ctrl-C, "
    "143 by SIGTERM, in both cases after the batch in flight; 70 a bug in this program "
    "(FEEDAPI_DEBUG=1 shows where)."
)
