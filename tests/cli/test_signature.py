"""A command by the fields of a dataclass: each option is declared once, and groups are included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from feedapi_client.cli.signature import command_of

Seen = list[Any]
seen: Seen = []


@dataclass(frozen=True, kw_only=True)
class Inner:
    panel: ClassVar[str] = "Inner things"

    depth: Annotated[int, typer.Option("--depth", min=1, help="How deep.")] = 3


@dataclass(frozen=True, kw_only=True)
class Group:
    color: Annotated[str | None, typer.Option("--color", metavar="NAME", help="A color.")] = None
    inner: Inner


@dataclass(frozen=True, kw_only=True)
class Options:
    place: Annotated[str, typer.Argument(metavar="PLACE")]
    words: Annotated[list[str] | None, typer.Argument(metavar="[WORD]...")] = None
    group: Group
    loud: Annotated[bool, typer.Option("--loud", help="Loudly.")] = False


def plain(options: Options) -> int | None:
    """Say where, and
    what.

    More about
    it.
    """
    seen.append(options)
    return 5 if options.loud else None


async def asynchronous(options: Options) -> int:
    """Do it."""
    seen.append(options)
    return 6


def run(function: Any, *arguments: str) -> tuple[int, str]:
    seen.clear()
    command = command_of(function, "it", "Examples:\n\nfeedapi it here")
    with CliRunner().isolation() as (_, __, output):
        with pytest.raises(SystemExit) as end:
            command.main(list(arguments), prog_name="it")
        return int(end.value.code or 0), output.getvalue().decode()


def test_the_function_gets_the_dataclass_with_all_that_it_includes() -> None:
    code, _ = run(plain, "here", "a", "b", "--color", "red", "--depth", "7")
    assert code == 0
    group = Group(color="red", inner=Inner(depth=7))
    assert seen == [Options(place="here", words=["a", "b"], group=group)]
    run(plain, "there")
    assert seen == [Options(place="there", group=Group(inner=Inner()))]


def test_what_the_function_returns_is_the_exit_code() -> None:
    assert run(plain, "here", "--loud")[0] == 5
    assert run(asynchronous, "here")[0] == 6


@pytest.mark.parametrize("arguments", [[], ["here", "--depth", "0"], ["here", "--bogus"]])
def test_typer_checks_the_fields(arguments: list[str]) -> None:
    assert run(plain, *arguments)[0] == 2
    assert seen == []


def test_the_help_has_paragraphs_panels_and_examples_as_they_are() -> None:
    lines = run(plain, "--help")[1].splitlines()
    for line in (
        "Usage: it [OPTIONS] PLACE [WORD]...",
        "  Say where, and what.",
        "  More about it.",
        "Inner things:",
        "  feedapi it here",
    ):
        assert line in lines
    assert [line for line in lines if line.endswith(":")] == [
        "Arguments:",
        "Options:",
        "Inner things:",
        "Examples:",
    ]


def test_an_option_that_is_there_twice_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice:
        depth: Annotated[int, typer.Option("--depth")] = 1
        inner: Inner

    def twice(options: Twice) -> None:
        """Do it."""

    twice.__annotations__ = {"options": Twice, "return": None}
    Twice.__annotations__ = {"depth": Annotated[int, typer.Option("--depth")], "inner": Inner}
    with pytest.raises(ValueError, match="duplicate parameter name: 'depth'"):
        command_of(twice, "it", "")
