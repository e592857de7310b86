"""Draw the help of each command on a screen of 100 columns: python docs/help_pictures.py FOLDER."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.text import Text
from typer.main import get_command

from feedapi_client.cli.app import app

COLUMNS = 100


def draw(folder: Path) -> list[Path]:
    """Save the help of each group and command as FOLDER/COMMAND.svg; return the files."""
    files, waiting = list[Path](), [("feedapi", get_command(app))]
    while waiting:
        name, command = waiting.pop()
        words = getattr(command, "list_commands", lambda _: ())(None)
        waiting += [(f"{name} {word}", command.get_command(None, word)) for word in words]
        out, screen = io.StringIO(), {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
        with redirect_stdout(out), patch.dict(os.environ, screen), suppress(SystemExit):
            command.main(["--help"], prog_name=name, standalone_mode=False)
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        console.print(Text.from_ansi(out.getvalue()))
        files.append(folder / f"{name.replace(' ', '-')}.svg")
        console.save_svg(str(files[-1]), title=f"{name} --help")
    return files


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
