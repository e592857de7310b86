"""Run ``feedapi`` in the process of the tests.

Typer's own runner builds all commands anew for each call, which took more than half of its time.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from typer.main import get_command
from typer.testing import CliRunner

from feedapi_client.cli.app import app

COMMANDS: Any = get_command(app)


def leaves(command: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the commands that are no groups, by their names."""
    if not hasattr(command, "list_commands"):
        return {" ".join(path): command}
    return {
        name: leaf
        for word in command.list_commands(None)
        for name, leaf in leaves(command.get_command(None, word), (*path, word)).items()
    }


LEAVES = leaves(COMMANDS)


class Invoked(NamedTuple):
    """What a command printed and returned. `output` is stdout and stderr as a terminal shows them.

    `exception` is one that escaped from the command.
    """

    exit_code: int
    stdout_bytes: bytes
    stderr: str
    output: str
    exception: Exception | None

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode()


def invoke(
    arguments: Sequence[str], *, input: str | None = None, env: Mapping[str, str] | None = None
) -> Invoked:
    """Run a command with these arguments, stdin and environment variables."""
    exit_code, exception = 0, None
    with CliRunner().isolation(input=input, env=env) as streams:
        try:
            COMMANDS.main(arguments, prog_name="feedapi")
        except SystemExit as end:
            exit_code = int(end.code or 0)
        except Exception as error:
            exit_code, exception = 1, error
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        stdout, stderr, output = (stream.getvalue() for stream in streams)
    return Invoked(exit_code, stdout, stderr.decode(), output.decode(), exception)


class Row(NamedTuple):
    """A command line, its exit code, and what it says.

    `says` is in the output, or all of stdout if it begins with "=". A failure is one line on
    stderr, and prints nothing: who is asked something, or says more, has an `input`. Words in
    `words` and `says` that stand for places are replaced.
    """

    words: str
    code: int = 0
    says: str = ""
    input: str | None = None


def play(rows: Iterable[Row], **places: object) -> Invoked:
    """Run the command lines one after the other. Return what the last one came to."""
    for row in rows:
        words = [str(places.get(word, word)) for word in shlex.split(row.words)]
        result, said = invoke(words, input=row.input), row.says
        for name, place in places.items():
            said = said.replace(name, str(place))
        assert result.exit_code == row.code, (row, result)
        if said.startswith("="):
            assert result.stdout == said[1:], row
        else:
            assert said in result.output, (row, result.output)
        if row.code and row.input is None:
            assert result.stderr.startswith("feedapi: "), (row, result.stderr)
            assert (result.stderr.count("\n"), result.stdout) == (1, ""), (row, result.output)
    return result
